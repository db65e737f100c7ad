"""The base class of all sections, and types of values."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# RoPE computes with positions in float32, which holds every integer up to here.
MOST_TOKENS = 2**24

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Theta = Annotated[
    float, Field(gt=1, le=1e38)
]  # frequencies are computed in float32, where 1e38 is the largest power of ten
Stretch = Annotated[float, Field(ge=1e-6, le=MOST_TOKENS)]  # of at most MOST_TOKENS positions
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
SmallCount = Annotated[int, Field(ge=1, le=2**16)]  # of threads, processes, heads: a limit for typing errors
Real = Annotated[float, Field(gt=0, le=1e30)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
PathText = Annotated[str, Field(min_length=1, max_length=4095)]  # Linux has no longer path


class Section(BaseModel):
    """Base of every section: unknown keys, conversions of types, nan, and changes after loading are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
