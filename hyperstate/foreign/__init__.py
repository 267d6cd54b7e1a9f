"""Checkpoints of other libraries, as far as their metadata tell: read without running any code of theirs.

readers   an object with PyTorch's or HyperParallel's methods, or a path
folders   a path: which kind of checkpoint lies there, and what its files say
metadata  the one form in which all of them come: name -> dtype, shape
unpickle  ``.metadata`` files, which are pickles
"""
