"""The experiments, a module each."""

from collections.abc import Sequence

from dev.results.experiments.amount import Amount
from dev.results.experiments.blocks import Blocks
from dev.results.experiments.chains import Chains
from dev.results.experiments.domains import Domains
from dev.results.experiments.languages import Languages
from dev.results.experiments.muon import Muon
from dev.results.experiments.options import OptionsOf
from dev.results.experiments.rates import Rates
from dev.results.experiments.serving import Serving
from dev.results.experiments.stage2 import Stage2
from dev.results.experiments.vocabularies import Vocabularies
from dev.results.finding import Experiment

EXPERIMENTS: Sequence[Experiment] = (
    Domains(), Stage2(), Rates(), Chains(), Vocabularies(), Blocks(), Languages(), Serving(),
    Amount(), OptionsOf(), Muon(),
)  # fmt: skip
"""In the order of the documentation."""
