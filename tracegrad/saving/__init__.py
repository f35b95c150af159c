"""Functions in files: written today, loaded and differentiated years later.

To write a function, `save` has `interface` check its specs, `source` trace it (a module of
flax.nnx is replaced by `modules`), and `program` export it (`refusals` explains failures);
`file` writes them with the records of `manifest`, atomically (`atomic`). To read a function, `load`
has `file` verify every byte, and `outside_calls` check which custom calls a program makes; `calls`
makes a differentiable function of the programs, and `loaded` calls it for the user.
Variables without functions are written by `checkpoints` with Orbax, and verified by `seal`;
`variables` finds Variables.
"""
