"""The closed words of status: condition types, their reasons, and why a stage can fail.

A reason is for machines and alerts, so its set is closed; the message beside it is for a person.
"""

from enum import IntEnum, StrEnum


class ConditionType(StrEnum):
    """What can be true of a resource. A backbone has RESOLVED, READY, PROGRESSING and SUSPENDED; a drafter all."""

    RESOLVED = "Resolved"
    TRAINED = "Trained"
    EVALUATED = "Evaluated"
    GATE_PASSED = "GatePassed"
    AVAILABLE = "Available"
    ROLLED_OUT = "RolledOut"
    ACCEPTANCE_DEGRADED = "AcceptanceDegraded"
    PROGRESSING = "Progressing"
    SUSPENDED = "Suspended"
    READY = "Ready"


class FailureReason(StrEnum):
    """Why a stage did not end well. Also the reason of the condition that tells so."""

    INVALID_CONFIG = "InvalidConfig"
    INVALID_DATA = "InvalidData"
    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_ACCESS_DENIED = "SourceAccessDenied"
    UNSUPPORTED_MODEL = "UnsupportedModel"
    STORAGE_NOT_FOUND = "StorageNotFound"
    STORAGE_ACCESS_DENIED = "StorageAccessDenied"
    STORAGE_UNSUPPORTED = "StorageUnsupported"
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    STORAGE_FULL = "StorageFull"
    HUB_UNAVAILABLE = "HubUnavailable"
    CORRUPT_ARTIFACT = "CorruptArtifact"
    SERVER_FAILED = "ServerFailed"
    SERVER_TIMEOUT = "ServerTimeout"
    DIVERGED = "Diverged"
    PEER_LOST = "PeerLost"
    STOPPED = "Stopped"
    OUT_OF_MEMORY = "OutOfMemory"
    OUT_OF_DISK = "OutOfDisk"
    INTERNAL_ERROR = "InternalError"
    # Seen by the operator, never said by a stage itself:
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    IMAGE_PULL = "ImagePull"
    UNSCHEDULABLE = "Unschedulable"
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105 - a reason, not a secret
    CLAIM_NOT_FOUND = "ClaimNotFound"
    NAME_TAKEN = "NameTaken"
    POD_REFUSED = "PodRefused"


class ConditionReason(StrEnum):
    """Reasons beside `FailureReason` that a condition can have."""

    # Progressing and its parts
    WAITING_FOR_BACKBONE = "WaitingForBackbone"
    BACKBONE_NOT_FOUND = "BackboneNotFound"
    BACKBONE_FAILED = "BackboneFailed"
    WAITING_FOR_SHARED_STAGE = "WaitingForSharedStage"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    RESOLVING = "Resolving"
    RUNNING = "Running"
    PENDING = "Pending"
    # Done well
    SUCCEEDED = "Succeeded"
    COMPLETE = "Complete"
    IMPORTED = "Imported"
    # Gate
    PASSED = "Passed"
    TOO_SLOW = "TooSlow"
    ACCEPTANCE_TOO_LOW = "AcceptanceTooLow"
    REGRESSED = "Regressed"
    OUTPUTS_DIFFER = "OutputsDiffer"
    # Serving
    NOT_REQUESTED = "NotRequested"
    ROLLING_OUT = "RollingOut"
    SERVING_WITHOUT_DRAFTER = "ServingWithoutDrafter"
    SERVER_NOT_READY = "ServerNotReady"
    # Adaptation
    NOT_ENOUGH_TRAFFIC = "NotEnoughTraffic"
    SERVERS_SILENT = "ServersSilent"
    AS_EVALUATED = "AsEvaluated"
    BELOW_EVALUATED = "BelowEvaluated"
    # Suspension
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"


class ExitCode(IntEnum):
    """What a stage's container exits with; podFailurePolicy and the operator act on it."""

    DONE = 0
    BUG = 1
    WRONG_INPUT = 64
    TRY_AGAIN = 75
    PEER_LOST = 76
    STOPPED = 143


EXIT_CODE_OF: dict[FailureReason, ExitCode] = {
    FailureReason.INVALID_CONFIG: ExitCode.WRONG_INPUT,
    FailureReason.INVALID_DATA: ExitCode.WRONG_INPUT,
    FailureReason.SOURCE_NOT_FOUND: ExitCode.WRONG_INPUT,
    FailureReason.SOURCE_ACCESS_DENIED: ExitCode.WRONG_INPUT,
    FailureReason.UNSUPPORTED_MODEL: ExitCode.WRONG_INPUT,
    FailureReason.STORAGE_NOT_FOUND: ExitCode.WRONG_INPUT,
    FailureReason.STORAGE_ACCESS_DENIED: ExitCode.WRONG_INPUT,
    FailureReason.STORAGE_UNSUPPORTED: ExitCode.WRONG_INPUT,
    FailureReason.STORAGE_UNAVAILABLE: ExitCode.TRY_AGAIN,
    FailureReason.STORAGE_FULL: ExitCode.TRY_AGAIN,
    FailureReason.HUB_UNAVAILABLE: ExitCode.TRY_AGAIN,
    FailureReason.CORRUPT_ARTIFACT: ExitCode.TRY_AGAIN,
    FailureReason.SERVER_FAILED: ExitCode.TRY_AGAIN,
    FailureReason.SERVER_TIMEOUT: ExitCode.TRY_AGAIN,
    FailureReason.DIVERGED: ExitCode.WRONG_INPUT,
    FailureReason.PEER_LOST: ExitCode.PEER_LOST,
    FailureReason.STOPPED: ExitCode.STOPPED,
    FailureReason.OUT_OF_MEMORY: ExitCode.WRONG_INPUT,
    FailureReason.OUT_OF_DISK: ExitCode.TRY_AGAIN,
    FailureReason.INTERNAL_ERROR: ExitCode.BUG,
}
"""How a stage that fails for a reason exits. The reasons that are missing are seen by the operator only."""
