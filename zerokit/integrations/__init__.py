"""Other libraries' training loops over `ZeroOptimizer`; each module is imported on demand and needs its library.

`accelerate`: an `Accelerator` whose `prepare` shards model and optimizer. `transformers`: a `Trainer` that uses it.
`lightning`: a strategy of Lightning's `Trainer`. Nothing else in zerokit imports this package.
"""
