"""Training stages of Osprey.

What the stages call, by module:

* `models.backbone`: `Backbone.prune(folder, layers)`, `.load(folder)`, `.save(folder)`.
* `models.target`: `Target(folder, tapped_layers=None).states(ids) -> TargetStates`.
* `models.draft`: `Drafter.from_backbone`, `.from_scratch`, `.with_draft_vocabulary`, `.load`, `.save`.
* `vocabulary`: `align(source, target) -> Alignment`, `choose_draft_vocabulary(counts, size)`.
* `objectives`: `Distillation(drafter, ...)` over `DialogueBatch`, `Pretraining(backbone)` over `WindowBatch`.
* `loop`: `train(objective, batches, settings, checkpoints, progress) -> TrainResult`.
* `acceptance`: `simulate(drafter, batch, steps) -> list[RequestAcceptance]`, `summarise`.
"""
