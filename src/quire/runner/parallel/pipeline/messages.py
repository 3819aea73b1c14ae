"""What the engine's process and the stages before its own send each other, in frames as ranks do."""

from typing import TypeAlias

import msgspec

from quire.runner.parallel.messages import Done, Failed, LoadAdapter, Message, Start, UnloadAdapter


class StageReady(Message):
    """The model is loaded, to run with these kernels."""

    isa: str


class StageStep(Message):
    """Compute a step: the first stage at once, another one when it gets the States."""

    number: int
    """Ascends with each step that is sent."""
    batch: bytes
    """As `quire.common.batch.encode` writes it."""


class States(Message):
    """What a stage has computed in a step, for the next one."""

    number: int
    num_rows: int
    dtype: str
    tensors: list[memoryview]
    """The rows of each tensor."""


class StepFailed(Message):
    """What a stage has computed is an error, and the stages behind it compute nothing."""

    number: int
    kind: str
    text: str


class Beat(Message):
    """Once a second, from each stage and rank."""

    has_computed: bool
    """Whether it has used its CPU since the last one."""


ToStage: TypeAlias = Start | StageStep | States | StepFailed | LoadAdapter | UnloadAdapter
FromStage: TypeAlias = StageReady | States | StepFailed | Beat | Done | Failed
TO_STAGE: msgspec.msgpack.Decoder[ToStage] = msgspec.msgpack.Decoder(ToStage, dec_hook=lambda kind, value: kind(value))
FROM_STAGE: msgspec.msgpack.Decoder[FromStage] = msgspec.msgpack.Decoder(FromStage)
