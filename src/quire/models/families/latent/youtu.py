"""Youtu-LLM (Tencent 2025): latent attention with an MLP in every layer"""

from typing import ClassVar

from quire.models.families.latent.deepseek import LatentDecoder


class YoutuForCausalLM(LatentDecoder):
    """The head uses the token table."""

    ties_by_default: ClassVar[bool] = True
