"""Where capture reaches into Dynamo. Beside ``_torch_private`` the only place that touches private torch.

``points`` names all that is used, ``hooks`` wraps the methods, and the others ask: ``values`` about variables, ``creation_clock`` when
an object was made, ``control`` about errors, restarts and settings, ``modules`` about lists of modules and their guards.
"""
