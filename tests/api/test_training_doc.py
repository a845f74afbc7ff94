"""docs/training.md names every option of the training stages, with the default that the contract has."""

from pathlib import Path

import yaml
from pydantic_core import PydanticUndefined

from osprey_api.backbone import Pretraining
from osprey_api.base import ApiModel
from osprey_api.drafter import Distillation

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def default(model: type[ApiModel], name: str) -> object:
    fields = {field.alias: field for field in model.model_fields.values()}
    if name not in fields:
        return "–"
    value = fields[name].get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, ApiModel):
        return value.model_dump(mode="json", by_alias=True)
    return "unset" if value is None else value


def test_every_option_is_described_with_its_default():
    table = PAGE.read_text(encoding="utf-8").partition("## The loss")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    described = {name.strip("`"): (yaml.safe_load(first), yaml.safe_load(second)) for name, first, second, _ in rows}
    names = {field.alias for model in (Pretraining, Distillation) for field in model.model_fields.values()}
    assert described == {name: (default(Pretraining, name), default(Distillation, name)) for name in names if name}
