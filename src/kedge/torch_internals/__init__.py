"""Everything private of PyTorch, one corner a file; nothing else in Kedge names ``torch._*``.

Each name is looked up when it is first needed. A missing name costs one feature, which one sentence
describes (`kedge.torch_internals.corners`), and neither the import of Kedge nor the program.
"""
