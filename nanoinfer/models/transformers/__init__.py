"""Models of the package transformers, run by our engine: their layers, with our attention, cache and sampling.

`probe.py` runs a model once without weights and records its attention calls. `transformers_config.py` makes of these
the config that the engine asks. `transformers_model.py` is the model that the runner runs; `guards.py` refuses, once
it is loaded, one whose tokens reach each other outside attention.
"""
