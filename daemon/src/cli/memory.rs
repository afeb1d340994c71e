//! Flags about memory, under the names that users of other programs know.

use std::path::PathBuf;

use clap::Args;

use crate::config::{ConfigError, Layers, Origin};

/// How memory is used. All of it can also be written under `[memory]`, and by model under `[model_memory.NAME]`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryFlags {
    /// A file with a table [memory]; what it leaves out comes from the preset it names, else from 24gb
    #[arg(long, value_name = "FILE")]
    pub memory: Option<PathBuf>,
    /// auto, 24gb, 16gb, 12gb, 8gb or minimal
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// When stages leave their device: auto, none, cond_only, cond_diffusion, aggressive, layer_streaming
    #[arg(long, value_name = "MODE")]
    pub offload_mode: Option<String>,
    /// The text encoder leaves before denoising, whatever the mode
    #[arg(long, overrides_with = "no_offload_cond_stage")]
    pub offload_cond_stage: bool,
    /// The text encoder stays
    #[arg(long, overrides_with = "offload_cond_stage")]
    pub no_offload_cond_stage: bool,
    /// The diffusion model leaves before decoding, whatever the mode
    #[arg(long, overrides_with = "no_offload_diffusion")]
    pub offload_diffusion: bool,
    /// The diffusion model stays
    #[arg(long, overrides_with = "offload_diffusion")]
    pub no_offload_diffusion: bool,
    /// A text encoder that left for a job comes back after it (the default)
    #[arg(long, overrides_with = "no_reload_cond_stage")]
    pub reload_cond_stage: bool,
    /// A text encoder that left comes back when it is needed
    #[arg(long, overrides_with = "reload_cond_stage")]
    pub no_reload_cond_stage: bool,
    /// A diffusion model that left for a job comes back after it (the default)
    #[arg(long, overrides_with = "no_reload_diffusion")]
    pub reload_diffusion: bool,
    /// A diffusion model that left comes back when it is needed
    #[arg(long, overrides_with = "reload_diffusion")]
    pub no_reload_diffusion: bool,
    /// Log what is moved and what is kept
    #[arg(long, overrides_with = "no_offload_log")]
    pub offload_log: bool,
    /// Do not log it (the default)
    #[arg(long, overrides_with = "offload_log")]
    pub no_offload_log: bool,
    /// How memory is estimated before it was measured: dryrun or formula
    #[arg(long, value_name = "METHOD")]
    pub vram_estimation: Option<String>,
    /// Layers that are read ahead while one runs
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", require_equals = false)]
    pub streaming_prefetch: Option<String>,
    /// Do not read ahead (the default)
    #[arg(long, conflicts_with = "streaming_prefetch")]
    pub no_streaming_prefetch: bool,
    /// MB of the device that stay free while a model is streamed
    #[arg(long, value_name = "MB")]
    pub streaming_min_vram: Option<String>,
    /// GiB of the device that may be used; below zero: that are spared
    #[arg(long, value_name = "GIB", allow_hyphen_values = true)]
    pub max_vram: Option<String>,
    /// Decode and encode in tiles
    #[arg(long, overrides_with = "no_vae_tiling")]
    pub vae_tiling: bool,
    /// Never in tiles
    #[arg(long, overrides_with = "vae_tiling")]
    pub no_vae_tiling: bool,
    /// Edge of a tile in pixels
    #[arg(long, value_name = "PIXELS")]
    pub vae_tile_size: Option<String>,
    /// Overlap of two tiles in pixels
    #[arg(long, value_name = "PIXELS")]
    pub vae_tile_overlap: Option<String>,
    /// Device of each stage, as text=cpu,vae=cpu
    #[arg(long, value_name = "STAGE=DEVICE,…")]
    pub backend: Option<String>,
    /// Where each stage's weights are kept, as text=disk,*=cpu
    #[arg(long, value_name = "STAGE=PLACE,…")]
    pub params_backend: Option<String>,
    /// Keep weights in host memory: --params-backend *=cpu
    #[arg(long, conflicts_with = "params_backend")]
    pub offload_to_cpu: bool,
    /// Run the VAE on the CPU: --backend vae=cpu
    #[arg(long)]
    pub vae_on_cpu: bool,
    /// Run the text encoder on the CPU: --backend text=cpu
    #[arg(long)]
    pub clip_on_cpu: bool,
}

impl MemoryFlags {
    /// Lays these flags over what is there.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn lay(&self, layers: &mut Layers) -> Result<(), ConfigError> {
        if let Some(file) = &self.memory {
            layers.memory_file(file)?;
        }
        for (flag, text) in [
            ("preset", &self.preset),
            ("offload-mode", &self.offload_mode),
            ("vram-estimation", &self.vram_estimation),
            ("streaming-prefetch", &self.streaming_prefetch),
            ("streaming-min-vram", &self.streaming_min_vram),
            ("max-vram", &self.max_vram),
            ("vae-tile-size", &self.vae_tile_size),
            ("vae-tile-overlap", &self.vae_tile_overlap),
            ("params-backend", &self.params_backend),
        ] {
            if let Some(text) = text {
                set(layers, flag, text, format!("--{flag}"))?;
            }
        }
        for (flag, on, off) in [
            ("offload-cond-stage", self.offload_cond_stage, self.no_offload_cond_stage),
            ("offload-diffusion", self.offload_diffusion, self.no_offload_diffusion),
            ("reload-cond-stage", self.reload_cond_stage, self.no_reload_cond_stage),
            ("reload-diffusion", self.reload_diffusion, self.no_reload_diffusion),
            ("offload-log", self.offload_log, self.no_offload_log),
            ("vae-tiling", self.vae_tiling, self.no_vae_tiling),
        ] {
            match (on, off) {
                (true, _) => set(layers, flag, "true", format!("--{flag}"))?,
                (false, true) => set(layers, flag, "false", format!("--no-{flag}"))?,
                (false, false) => {}
            }
        }
        if self.no_streaming_prefetch {
            set(layers, "streaming-prefetch", "0", "--no-streaming-prefetch".into())?;
        }
        if self.offload_to_cpu {
            set(layers, "params-backend", "*=cpu", "--offload-to-cpu".into())?;
        }
        // The aliases add to what --backend says, and contradict it where both name a stage.
        let aliases = [("--vae-on-cpu", "vae=cpu", self.vae_on_cpu), ("--clip-on-cpu", "text=cpu", self.clip_on_cpu)];
        let given: Vec<(&str, &str)> = std::iter::once(("--backend", self.backend.as_deref()))
            .chain(aliases.map(|(flag, text, on)| (flag, on.then_some(text))))
            .filter_map(|(flag, text)| Some((flag, text?)))
            .collect();
        if !given.is_empty() {
            let text = given.iter().map(|(_, text)| *text).collect::<Vec<_>>().join(",");
            let flags = given.iter().map(|(flag, _)| *flag).collect::<Vec<_>>().join(" ");
            set(layers, "backend", &text, flags)?;
        }
        Ok(())
    }
}

fn set(layers: &mut Layers, flag: &str, text: &str, origin: String) -> Result<(), ConfigError> {
    layers.set_by_name(&format!("memory.{}", flag.replace('-', "_")), text, Origin::Flag(origin))
}
