"""The engines of `catalogue.engines`: `trainer` defines their interface, and each other module is one engine.

An engine's module is named as the engine (unless `Engine.module` says otherwise), and its trainer as both:
`fsdp2.Fsdp2Trainer`. It overrides only what the engine does otherwise than a plain torch loop. It is tuned as its users
would, imports what it needs when it is used (nobody's memory includes another's modules), and starts from the same
weights on the same batches as every other.
"""
