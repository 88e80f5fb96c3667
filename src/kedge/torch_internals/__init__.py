"""Everything private of PyTorch, one corner a file; nothing else in Kedge names ``torch._*``.

Each name is looked up when it is first needed. What a PyTorch lacks costs one feature, said in one sentence
(`kedge.torch_internals.corners`), never the import of Kedge, and never the program.
"""
