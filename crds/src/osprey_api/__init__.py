"""The contract of Osprey: everything that two of its parts must agree on, and nothing else.

`backbone` and `drafter` are the two resources that users write; `stages` is what a stage's pod is told and
what it answers; `conditions` are the closed words of status; `naming`, `fingerprint` and `sources` are how
things are named, addressed and found. `schema` turns the resources into the CRDs beside this package.
"""

__version__ = "0.1.0"
