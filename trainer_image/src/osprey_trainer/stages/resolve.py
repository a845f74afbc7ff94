"""Pin the external inputs of a resource, and check what can be checked before anything large is downloaded.

A model is pinned to its commit or content, data to its commit or content; of files every row is read and judged, so
that data with too many broken rows ends the resource here and not after hours of another stage. Of a hub data set only
the first rows are: all of it may be terabytes.
"""

from collections.abc import Iterator
from typing import cast

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from osprey_api.backbone import KIND as BACKBONE_KIND
from osprey_api.conditions import FailureReason
from osprey_api.rows import shortened
from osprey_api.sources import HubSource, parse
from osprey_api.stages import DataToResolve, ModelFacts, PinnedData, ResolveConfig, ResolveResult, StorageLocation
from osprey_runtime.context import StageContext
from osprey_runtime.data import Ledger, documents, pin
from osprey_runtime.errors import StageError
from osprey_runtime.models import resolve_model
from osprey_runtime.prompts import conversations
from osprey_runtime.store import open_store
from osprey_trainer.models.target import default_tapped_layers

_BACKBONE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_HUB_ROWS = 100


def run(ctx: StageContext) -> ResolveResult:
    """Pins model and data.

    Raises:
        StageError: the storage cannot be used; the model or data is missing, forbidden or broken;
            UNSUPPORTED_MODEL by the name of its architecture.
    """
    config = cast(ResolveConfig, ctx.config)
    storage = ctx.task.storage
    open_store(storage).probe()
    model, facts = resolve_model(config.model.uri, config.model.revision, storage)
    _check_architecture(config.model.uri, facts, resource=ctx.task.resource)
    ctx.progress.begin(len(config.data))
    data = []
    for done, source in enumerate(config.data, start=1):
        data.append(_pinned(source, storage))
        ctx.progress.update(done)
    return ResolveResult(model=model, facts=facts, data=tuple(data))


def _check_architecture(uri: str, facts: ModelFacts, *, resource: str) -> None:
    """A backbone's body is computed here; a target is run by transformers, and tapped in three of its layers."""
    if resource.partition("/")[0] == BACKBONE_KIND.lower():
        if facts.architecture not in _BACKBONE_ARCHITECTURES:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"{uri} is a {facts.architecture}; a backbone can be cut from a {', '.join(_BACKBONE_ARCHITECTURES)}: "
                "name another source.",
            )
        return
    if facts.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"{uri} is a {facts.architecture or 'model without an architecture'}, which is no causal language model "
            "that transformers knows: name another target.",
        )
    default_tapped_layers(facts.layers)


def _pinned(data: DataToResolve, storage: StorageLocation) -> PinnedData:
    source = pin(data.uri, storage)
    from_hub = isinstance(parse(data.uri), HubSource)
    limit = _HUB_ROWS if from_hub else None
    ledger = Ledger(data.uri, data.max_dropped)
    if data.field is not None and data.kind == "Text":
        found: Iterator[object] = documents(source, data.field, storage, ledger, limit=limit)
    else:
        found = conversations(source, data.field, storage, ledger, limit=limit)
    for _ in found:
        pass
    kept = None if from_hub else ledger.kept
    return PinnedData(name=data.name, source=source, rows=kept, dropped=shortened(ledger.dropped))
