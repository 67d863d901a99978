"""Where capture reaches into Dynamo. Beside ``_torch_private`` the only place that touches private torch.

``points`` names all that is used, ``hooks`` wraps what stands between Dynamo and a frame, ``observed`` has the classes that frames of ours
have in place of Dynamo's, ``called`` what tensors are called with, and the others ask: ``values`` about variables, ``lists`` what an
instruction calls, ``creation_clock`` when an object was made, ``control`` about errors, restarts and settings, ``modules`` about lists of
modules and their guards.
"""
