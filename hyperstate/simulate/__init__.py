"""What moving a state would cost on meshes that nobody has: the engine's own plan, counted instead of carried out.

placement  a mesh and a rule, as a person writes them -> layouts
traffic    layouts -> bytes, messages and memory of each rank, equal ranks counted once
costs      a whole state and an operation -> figures, beside PyTorch's
"""
