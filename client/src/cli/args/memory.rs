//! How a request uses memory, under the names that users of other programs know.

use clap::Args;
use sd_client::names;
use sd_client::proto::{MemoryRequest, OffloadMode};

fn mode(text: &str) -> Result<OffloadMode, names::UnknownName> {
    names::parse_offload_mode(text)
}

fn mode_help() -> String {
    let list: Vec<&str> = names::offload_modes().collect();
    format!("When stages leave the device: {} [default: as the daemon is configured]", list.join(", "))
}

/// Options of a request's memory. What is not given is as the model's and the daemon's configuration say.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Memory")]
pub(in crate::cli) struct MemoryArgs {
    /// When stages leave the device
    #[arg(long, value_name = "MODE", value_parser = mode, help = mode_help())]
    offload_mode: Option<OffloadMode>,
    /// Take the text encoder off the device before denoising
    #[arg(long, overrides_with = "no_offload_cond_stage")]
    offload_cond_stage: bool,
    /// Leave the text encoder where it is
    #[arg(long, overrides_with = "offload_cond_stage")]
    no_offload_cond_stage: bool,
    /// Take the diffusion model off the device before decoding
    #[arg(long, overrides_with = "no_offload_diffusion")]
    offload_diffusion: bool,
    /// Leave the diffusion model where it is
    #[arg(long, overrides_with = "offload_diffusion")]
    no_offload_diffusion: bool,
    /// Bring the text encoder back after the job
    #[arg(long, overrides_with = "no_reload_cond_stage")]
    reload_cond_stage: bool,
    /// Do not bring the text encoder back before it is needed
    #[arg(long, overrides_with = "reload_cond_stage")]
    no_reload_cond_stage: bool,
    /// Bring the diffusion model back after the job
    #[arg(long, overrides_with = "no_reload_diffusion")]
    reload_diffusion: bool,
    /// Do not bring the diffusion model back before it is needed
    #[arg(long, overrides_with = "reload_diffusion")]
    no_reload_diffusion: bool,
    /// Decode in tiles: less memory, slower [default: where the whole does not fit]
    #[arg(long, overrides_with = "no_vae_tiling")]
    vae_tiling: bool,
    /// Decode whole, or be refused where that does not fit
    #[arg(long, overrides_with = "vae_tiling")]
    no_vae_tiling: bool,
    /// Edge of a tile, a multiple of 8
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(1..))]
    vae_tile_size: Option<u32>,
    /// Overlap of two tiles, a multiple of 8
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(1..))]
    vae_tile_overlap: Option<u32>,
}

/// What two opposite switches say together.
fn either(yes: bool, no: bool) -> Option<bool> {
    match (yes, no) {
        (true, _) => Some(true),
        (false, true) => Some(false),
        (false, false) => None,
    }
}

impl MemoryArgs {
    /// As the daemon is asked; `None` where nothing is asked.
    pub(in crate::cli) fn request(&self) -> Option<MemoryRequest> {
        let request = MemoryRequest {
            mode: self.offload_mode.unwrap_or(OffloadMode::Unspecified).into(),
            offload_cond_stage: either(self.offload_cond_stage, self.no_offload_cond_stage),
            offload_diffusion: either(self.offload_diffusion, self.no_offload_diffusion),
            reload_cond_stage: either(self.reload_cond_stage, self.no_reload_cond_stage),
            reload_diffusion: either(self.reload_diffusion, self.no_reload_diffusion),
            vae_tiling: either(self.vae_tiling, self.no_vae_tiling),
            vae_tile_size: self.vae_tile_size.unwrap_or(0),
            vae_tile_overlap: self.vae_tile_overlap.unwrap_or(0),
        };
        (request != MemoryRequest::default()).then_some(request)
    }
}
