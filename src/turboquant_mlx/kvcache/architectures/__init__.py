"""Which pieces each model type keeps: one rule per family, and which types belong to it.

A rule reads the language model's part of config.json and returns the layers' pieces, in the order
and with the sizes of the classes that load it. Where a published config leaves a value out, the
class's own default stands in (``defaults``). The rules are in ``attention``, ``latent`` and
``recurrent``, by what the layers keep; ``table`` says which model type follows which.

No MLX here.
"""
