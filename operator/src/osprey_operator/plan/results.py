"""A stage's result as the headline figures of its status entry, and back."""

from osprey_api.drafter import AcceptanceStatus, DomainAcceptanceStatus, ThroughputStatus
from osprey_api.stages import EvaluateResult, Outcome

POSITIONS_SHOWN = 15
"""With 8 domains of 5 figures and 9 other ones, this many positions keep within the 64 that a status entry holds."""
DOMAIN_FIGURES = (
    "requests",
    "acceptance_length",
    "acceptance_length_corpus",
    "tokens_per_second",
    "baseline_tokens_per_second",
)


def metrics_of(outcome: Outcome) -> dict[str, float]:
    """Return the numbers of an outcome: those of its domains as `<domain>.<figure>`, positions as `accepted_at_<n>`."""
    metrics = {"seconds": outcome.seconds, "peak_memory_bytes": float(outcome.peak_memory_bytes)}
    if outcome.result is None:
        return metrics
    for name, value in outcome.result:
        if isinstance(value, int | float):
            metrics[name] = float(value)
        elif name == "dropped":
            metrics |= {f"dropped.{reason}": float(count) for reason, count in value.items()}
    if isinstance(outcome.result, EvaluateResult):
        for domain in outcome.result.by_domain:
            for figure in DOMAIN_FIGURES:
                metrics[f"{domain.name}.{figure}"] = float(getattr(domain, figure))
        for position, share in enumerate(outcome.result.acceptance_by_position[:POSITIONS_SHOWN], start=1):
            metrics[f"accepted_at_{position}"] = share
    return metrics


def speedup(metrics: dict[str, float], domain: str = "") -> float:
    """Return tokens per second relative to no drafter, of a domain or overall; 0 where no baseline was measured."""
    prefix = f"{domain}." if domain else ""
    baseline = metrics[f"{prefix}baseline_tokens_per_second"]
    return metrics[f"{prefix}tokens_per_second"] / baseline if baseline > 0 else 0.0


def acceptance_status(metrics: dict[str, float], domains: tuple[str, ...], live: float | None) -> AcceptanceStatus:
    """Return `status.acceptanceLength` from an evaluation's metrics."""
    return AcceptanceStatus(
        evaluated=_shown(metrics["acceptance_length"]),
        evaluated_corpus=_shown(metrics["acceptance_length_corpus"]),
        live=live,
        by_domain=tuple(
            DomainAcceptanceStatus(
                name=domain,
                evaluated=_shown(metrics[f"{domain}.acceptance_length"]),
                evaluated_corpus=_shown(metrics[f"{domain}.acceptance_length_corpus"]),
                speedup=_shown(speedup(metrics, domain)),
            )
            for domain in domains
            if f"{domain}.acceptance_length" in metrics
        ),
    )


def throughput_status(metrics: dict[str, float], live: float | None) -> ThroughputStatus:
    """Return `status.tokensPerSecond` from an evaluation's metrics."""
    return ThroughputStatus(
        baseline=_shown(metrics["baseline_tokens_per_second"]),
        evaluated=_shown(metrics["tokens_per_second"]),
        live=live,
    )


def _shown(value: float) -> float:
    """Round to what a person reads in a table."""
    return round(value, 3)
