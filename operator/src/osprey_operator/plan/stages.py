"""The configs of the stages, from a resource's spec and its pinned inputs. Only what changes a result is in them."""

from osprey_api.backbone import OspreyBackboneSpec, Pretraining
from osprey_api.common import ModelSource
from osprey_api.drafter import DataUse, Distillation, OspreyDrafterSpec
from osprey_api.fingerprint import sha256
from osprey_api.naming import ANNOTATION_RETRY
from osprey_api.stages import (
    CODE_VERSION,
    AdoptConfig,
    BaselineConfig,
    CaptureConfig,
    ConvertConfig,
    DataToResolve,
    DistilConfig,
    Engine,
    EvaluateConfig,
    HeldOut,
    Optimization,
    Pinned,
    PretrainConfig,
    PromptSource,
    PruneConfig,
    RegenerateConfig,
    ResolveConfig,
    Speculation,
    StageName,
    TextSource,
    TokenizeConfig,
)
from osprey_api.status import Resolved
from osprey_operator.children import annotation
from osprey_operator.state import KubernetesObject, Owner, Settings


def resolve_backbone(resource: KubernetesObject, owner: Owner, spec: OspreyBackboneSpec) -> ResolveConfig:
    """Pin the source LM and the text."""
    if spec.source is None:
        raise ValueError("an imported backbone resolves nothing")
    texts = spec.pretraining.data if spec.pretraining is not None else ()
    return ResolveConfig(
        model=_to_pin(spec.source),
        data=tuple(
            DataToResolve(
                name=text_name(index), uri=text.uri, kind="Text", field=text.text_field, max_dropped=text.max_dropped
            )
            for index, text in enumerate(texts)
        ),
        owner_uid=owner.uid,
        retry=annotation(resource, ANNOTATION_RETRY),
    )


def prune(spec: OspreyBackboneSpec, resolved: Resolved) -> PruneConfig:
    """Keep the first blocks."""
    return PruneConfig(source=resolved.model, layers=spec.layers)


def tokenize(pretraining: Pretraining, resolved: Resolved) -> TokenizeConfig:
    """Text to tokens."""
    return TokenizeConfig(
        tokenizer=resolved.model,
        data=tuple(
            TextSource(
                source=_pinned(resolved, text_name(index)), text_field=text.text_field, max_dropped=text.max_dropped
            )
            for index, text in enumerate(pretraining.data)
        ),
    )


def pretrain(pretraining: Pretraining) -> PretrainConfig:
    """Stage 2."""
    return PretrainConfig(
        steps=pretraining.steps,
        loss_vocab_size=pretraining.loss_vocab_size,
        freeze_embedding=pretraining.freeze_embedding,
        optimization=_optimization(pretraining),
    )


def resolve_drafter(resource: KubernetesObject, owner: Owner, spec: OspreyDrafterSpec) -> ResolveConfig:
    """Pin the target and the prompts."""
    return ResolveConfig(
        model=_to_pin(spec.target),
        data=tuple(
            DataToResolve(
                name=data.name, uri=data.uri, kind="Prompts", field=data.prompt_field, max_dropped=data.max_dropped
            )
            for data in spec.data
        ),
        teaches=spec.import_ is None,
        owner_uid=owner.uid,
        retry=annotation(resource, ANNOTATION_RETRY),
    )


def regenerate(spec: OspreyDrafterSpec, resolved: Resolved, settings: Settings) -> RegenerateConfig:
    """The target answers the prompts that train."""
    return RegenerateConfig(
        target=resolved.model,
        prompts=_prompts(spec, resolved),  # also those that only evaluate: what they hold out is in no training
        held_out=_held_out(spec),
        max_tokens=spec.regeneration.max_tokens,
        temperature=spec.regeneration.temperature,
        seed=spec.regeneration.seed,
        engine=_engine(spec, settings),
    )


def baseline(spec: OspreyDrafterSpec, resolved: Resolved, settings: Settings) -> BaselineConfig:
    """The target alone on the held-out prompts."""
    return BaselineConfig(
        target=resolved.model,
        prompts=_evaluated_prompts(spec, resolved),
        held_out=_held_out(spec),
        max_tokens=spec.evaluation.max_tokens,
        concurrency=spec.evaluation.concurrency,
        engine=_engine(spec, settings),
    )


def capture(spec: OspreyDrafterSpec, resolved: Resolved) -> CaptureConfig:
    """The target's states of its answers."""
    return CaptureConfig(
        target=resolved.model,
        sequence_length=spec.distillation.sequence_length,
        precision=spec.distillation.precision,
    )


def adopt(resolved: Resolved) -> AdoptConfig:
    """An imported drafter, held against the target."""
    return AdoptConfig(target=resolved.model)


def convert(spec: OspreyDrafterSpec, resolved: Resolved) -> ConvertConfig:
    """Backbone to initial drafter."""
    size = spec.distillation.draft_vocab_size
    return ConvertConfig(
        target=resolved.model,
        draft_vocab_size=None if size is None or size >= resolved.facts.vocab_size else size,
        seed=spec.distillation.seed,
    )


def distil(spec: OspreyDrafterSpec, resolved: Resolved) -> DistilConfig:
    """Stage 4."""
    wanted = spec.distillation
    return DistilConfig(
        target=resolved.model,
        epochs=wanted.epochs,
        unroll=wanted.unroll,
        # What the loss does not heed stays at one value, so that changing it trains nothing anew.
        decay=wanted.decay if wanted.step_weights is None else 1.0,
        step_weights=wanted.step_weights,
        loss=wanted.loss,
        lk_decay=wanted.lk_decay if wanted.loss == "LKLambda" else 0.0,
        hard_label_weight=wanted.hard_label_weight,
        freeze_embedding=wanted.freeze_embedding,
        teacher=wanted.teacher.mode,
        optimization=_optimization(wanted),
    )


def evaluate(spec: OspreyDrafterSpec, resolved: Resolved, settings: Settings) -> EvaluateConfig:
    """The target with the drafter on the prompts of the baseline, drafting as it will when it serves."""
    return EvaluateConfig(
        **{name: value for name, value in baseline(spec, resolved, settings) if name != "stage"},
        speculation=spec.serving.speculation if spec.serving is not None else Speculation(),
    )


def measured(config: EvaluateConfig) -> str:
    """Return the same for two evaluations whose acceptance lengths can be compared, whatever they cost in time."""
    asked = config.model_dump(mode="json", exclude={"stage", "target", "concurrency"})
    return sha256({**asked, "code": CODE_VERSION[StageName.EVALUATE]})


def evaluated_domains(spec: OspreyDrafterSpec) -> tuple[str, ...]:
    """Return the names of the domains that are evaluated."""
    return tuple(data.name for data in spec.data if data.use is not DataUse.TRAIN)


def text_name(index: int) -> str:
    """Name a source of text, which has no name in the spec, by its place."""
    return f"text-{index}"


def _to_pin(source: ModelSource) -> Pinned:
    return Pinned(uri=source.uri, revision=source.revision if source.uri.startswith("hf://") else None)


def _pinned(resolved: Resolved, name: str) -> Pinned:
    for data in resolved.data:
        if data.name == name:
            return data.source
    raise ValueError(f"{name} was not resolved")


def _prompts(spec: OspreyDrafterSpec, resolved: Resolved) -> tuple[PromptSource, ...]:
    return tuple(
        PromptSource(
            name=data.name,
            source=_pinned(resolved, data.name),
            prompt_field=data.prompt_field,
            max_dropped=data.max_dropped,
            samples=data.samples if data.use is not DataUse.EVALUATE else None,
            train=data.use is not DataUse.EVALUATE,
            evaluate=data.use is not DataUse.TRAIN,
        )
        for data in spec.data
    )


def _evaluated_prompts(spec: OspreyDrafterSpec, resolved: Resolved) -> tuple[PromptSource, ...]:
    """Return the sources that evaluate, without what matters to training only: that must not repeat a baseline."""
    return tuple(prompt.model_copy(update={"samples": None}) for prompt in _prompts(spec, resolved) if prompt.evaluate)


def _held_out(spec: OspreyDrafterSpec) -> HeldOut:
    return HeldOut(samples=spec.evaluation.samples, seed=spec.regeneration.seed)


def _engine(spec: OspreyDrafterSpec, settings: Settings) -> Engine:
    """Return the engine of every server of a drafter.

    The GPU product is not part of it yet: which one a Job will get is not known before it runs, and pinning it
    needs a field by which the user chooses one.
    """
    image = spec.serving.image if spec.serving is not None else None
    return Engine(
        version=settings.sglang_version if image is None or image == settings.sglang_image else image,
        server_args=spec.target.server_args,
        tensor_parallel=spec.target.tensor_parallel,
    )


def _optimization(training: Pretraining | Distillation) -> Optimization:
    return Optimization(
        muon_scale=training.muon_scale if training.optimizer == "Muon" else None,
        learning_rate=training.learning_rate,
        schedule=training.schedule,
        warmup_ratio=training.warmup_ratio,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_norm,
        ema_decay=training.ema_decay,
        global_batch_size=training.global_batch_size,
        sequence_length=training.sequence_length,
        precision=training.precision,
        seed=training.seed,
    )
