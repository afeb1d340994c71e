//! Generates the gRPC code from the `.proto` files with protox, so that no `protoc` is needed.
use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["sd/v1/generation.proto", "sd/v1/control.proto", "sd/v1/job.proto", "sd/worker/v1/link.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().build_transport(true).compile_fds(descriptors)?;
    Ok(())
}
