"""How a running stage tells its progress: names of the Prometheus metrics of its pod."""

STEP = "osprey_stage_step"
TOTAL_STEPS = "osprey_stage_total_steps"
LOSS = "osprey_stage_loss"
TOKENS_PER_SECOND = "osprey_stage_tokens_per_second"
ETA_SECONDS = "osprey_stage_eta_seconds"
SIMULATED_ACCEPTANCE_LENGTH = "osprey_stage_simulated_acceptance_length"
