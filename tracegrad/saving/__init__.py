"""Functions in files: written today, loaded and differentiated years later.

The way of a function into a file: `save` asks `interface` for its specs and its graph (`modules`:
of a method of flax.nnx), `program` for its programs (`source`: what each is made of, `refusals`:
why one cannot be written), and `file` writes them (`manifest`: what is said of them, `atomic`: in
one step). The way back: `load` has `file` compare every byte, and `outside_calls` what a program
may call; `calls` makes a function with gradients of the programs, `loaded` calls it for the user.
`trees` are arguments and results as they are written. Variables alone go by `checkpoints` to Orbax,
which `seal` watches over; `variables` finds them, and `placement` says how they lie on devices.
"""
