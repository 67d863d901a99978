"""What a call of an op means: its tensors by name, its checks, its reference, its activations and encodings."""
