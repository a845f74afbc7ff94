"""docs/training.md names every option of the training stages, with the default that the contract has."""

from pathlib import Path

import yaml
from pydantic_core import PydanticUndefined

from osprey_api.backbone import Pretraining
from osprey_api.base import ApiModel
from osprey_api.drafter import Distillation

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def defaults(model: ApiModel | type[ApiModel]) -> dict[str, object]:
    """The default of every option; those of a part are named PART.OPTION."""
    found: dict[str, object] = {}
    for field in (model if isinstance(model, type) else type(model)).model_fields.values():
        name, value = str(field.alias), field.get_default(call_default_factory=True)
        if isinstance(value, ApiModel):
            found |= {f"{name}.{inner}": default for inner, default in defaults(value).items()}
        elif value is PydanticUndefined:
            found[name] = "required"
        else:
            found[name] = "unset" if value is None else value
    return found


def test_every_option_is_described_with_its_default():
    table = PAGE.read_text(encoding="utf-8").partition("## The loss")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    described = {name.strip("`"): (yaml.safe_load(stage2), yaml.safe_load(stage4)) for name, stage2, stage4, _ in rows}
    first, second = defaults(Pretraining), defaults(Distillation)
    assert described == {name: (first.get(name, "–"), second.get(name, "–")) for name in first | second}
