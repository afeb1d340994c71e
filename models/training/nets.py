"""The three networks, their sizes, and the normalisation they train with."""

import torch
import torch.nn as nn
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

SIZE = 256
LATENT = 32
TOKENS = 77
SCHEDULE = dict(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    num_train_timesteps=1000,
    clip_sample=False,
    set_alpha_to_one=False,
    steps_offset=1,
    prediction_type="v_prediction",
    timestep_spacing="trailing",
)


class ChannelsLastGroupNorm(nn.GroupNorm):
    """nn.GroupNorm from per-channel sums: the same function, but a channels-last tensor is read in order. The library's
    kernels gather the two to five channels of a group pixel by pixel, which takes longer than the convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        places = tuple(range(2, x.ndim))
        wide = x.float()
        groups = (batch, self.num_groups, channels // self.num_groups)
        mean = wide.mean(places).view(groups).mean(-1, keepdim=True)
        square = (wide * wide).mean(places).view(groups).mean(-1, keepdim=True)
        spread = ((square - mean * mean).clamp_min(0) + self.eps).rsqrt()
        scale = spread.expand(groups).reshape(batch, channels) * self.weight
        shift = self.bias - mean.expand(groups).reshape(batch, channels) * scale
        column = (batch, channels) + (1,) * len(places)
        return (wide * scale.view(column) + shift.view(column)).to(x.dtype)


def prepare(module: nn.Module, device: str) -> nn.Module:
    """Ready to train: on the device, channels-last, with the normalisation above."""
    for child in module.modules():
        if type(child) is nn.GroupNorm:
            child.__class__ = ChannelsLastGroupNorm
    return module.to(device).to(memory_format=torch.channels_last)


def autoencoder(tiny: bool) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        sample_size=SIZE,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 16, 16] if tiny else [32, 64, 96, 128],
        layers_per_block=1,
        norm_num_groups=8 if tiny else 16,
    )


def text_encoder(vocabulary: int, tiny: bool) -> CLIPTextModel:
    width = 32 if tiny else 192
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=64 if tiny else 704,
            projection_dim=width,
            num_hidden_layers=2 if tiny else 3,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
            attention_dropout=0.0,
        )
    )


def unet(tiny: bool) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 32, 64) if tiny else (64, 128, 160),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32 if tiny else 192,
        attention_head_dim=4,
        norm_num_groups=32,
    )


def scheduler() -> DDIMScheduler:
    return DDIMScheduler(**SCHEDULE)


def millions(module: nn.Module) -> float:
    return round(sum(p.numel() for p in module.parameters()) / 1e6, 2)
