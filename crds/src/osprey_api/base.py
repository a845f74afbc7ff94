"""The base of every model in the contract: camelCase on the wire, immutable, and strict about unknown fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A part of a resource or of a stage's task. Unknown fields are an error: a typo must not be ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class StatusModel(ApiModel):
    """A part of status, which an operator of another version may have written: unknown fields are left alone."""

    model_config = ConfigDict(extra="ignore")


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label: lower-case letters, digits and hyphens."""

SubdomainName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""The name of another object of the namespace, such as a Secret or a claim."""

Sentence = Annotated[str, Field(max_length=2048)]
"""Text for a person."""

Digest = Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
"""SHA-256 of content."""
