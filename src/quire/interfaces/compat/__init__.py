"""Modules where vLLM has them, each of which only names what Quire has elsewhere (ADR 0028).

`quire/__init__.py` appends this folder to the package's search path, so `import quire.inputs` finds `inputs.py` here.
A type checker does not follow that: it knows the module as `quire.interfaces.compat.inputs`. Quire imports nothing from
here.
"""
