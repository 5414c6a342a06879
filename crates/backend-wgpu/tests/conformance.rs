//! The conformance suite on this machine's first GPU, which on most machines that test is a processor that plays one: without
//! cooperative matrices, and with them where it has them; and there some of its cases with the kernels of real GPUs, and with those
//! whose matrices are plain code.

use std::sync::LazyLock;

use paguro_backend::{Backend, KvDtype};
use paguro_backend_conformance::{Draw, Subject, gpu_subject};
use paguro_backend_wgpu::{Gpu, GpuOptions, Profile, gpus};

/// Opened once: its kernels are compiled once for all cases.
static EXACT: LazyLock<Result<Gpu, String>> = LazyLock::new(|| open(GpuOptions::default()));
static COOPERATIVE: LazyLock<Result<Gpu, String>> =
    LazyLock::new(|| match open(GpuOptions { cooperative: true, ..GpuOptions::default() })? {
        gpu if gpu.exact_rows() > 1 => Ok(gpu),
        _ => Err("this GPU has no cooperative matrices".to_owned()),
    });

fn open(options: GpuOptions) -> Result<Gpu, String> {
    Gpu::open(0, GpuOptions { poison: true, ..options })
}

/// The subject of a suite. Software drivers compile and run slowly, so they run a sample of each case's variants.
fn subject(gpu: &Gpu, kv_dtype: KvDtype) -> Subject {
    let draw = if is_software() { Draw::from_env() } else { Draw::All };
    let (exact_rows, gpu) = (gpu.exact_rows(), gpu.clone());
    gpu_subject(move || Box::new(gpu.clone()), exact_rows, kv_dtype, draw)
}

fn is_software() -> bool {
    gpus().first().is_some_and(|gpu| gpu.is_software)
}

/// `cargo xtask test` runs cases with several widths of the software driver's subgroups.
#[test]
fn subgroups_are_as_wide_as_asked_for() {
    let width = std::env::var("LP_NATIVE_VECTOR_WIDTH").ok().and_then(|bits| bits.parse::<usize>().ok());
    let Some(width) = width.filter(|_| is_software()) else { return };
    let gpu = EXACT.as_ref().expect("a GPU that was listed");
    let expected = format!("subgroups of {} threads", width / 32);
    let features = gpu.capacity().features;
    assert!(features.contains(&expected), "{features:?}, not {expected}");
}

/// Opens a software driver, for tests that need one.
fn open_software(options: GpuOptions, why: &str) -> Result<Gpu, String> {
    if !gpus().is_empty() && !is_software() {
        return Err(why.to_owned());
    }
    open(options)
}

paguro_backend_conformance::conformance!(maybe EXACT.as_ref().map(|gpu| subject(gpu, KvDtype::F16)));

mod q8 {
    use super::{EXACT, KvDtype, subject};

    paguro_backend_conformance::conformance!(maybe EXACT.as_ref().map(|gpu| subject(gpu, KvDtype::Q8)));
}

mod q4 {
    use super::{EXACT, KvDtype, subject};

    paguro_backend_conformance::conformance!(maybe EXACT.as_ref().map(|gpu| subject(gpu, KvDtype::Q4)); only
        head_dims unusual_head_dims grouped_heads large_keys attention_gates sinks windows shared_kv latent_attention everything
        pages lengths many_rows long_context gather batch_invariance exact_in_chunks exact_latent exact_geometry
        exact_from_outside foreign_pages kernel_counts);
}

/// Submissions of one launch, and steps in passes of a few rows, as on GPUs with a watchdog.
mod short {
    use std::{sync::LazyLock, time::Duration};

    use super::{Gpu, GpuOptions, KvDtype, open, subject};

    static SHORT: LazyLock<Result<Gpu, String>> = LazyLock::new(|| {
        open(GpuOptions { submission: Some(Duration::from_nanos(1)), ..GpuOptions::default() })
    });

    paguro_backend_conformance::conformance!(maybe SHORT.as_ref().map(|gpu| subject(gpu, KvDtype::F16)); only
        alternating_windows many_rows given_rows rope_axes spans bidirectional means outputs carried_tokens);
}

mod cooperative {
    use super::{COOPERATIVE, KvDtype, subject};

    paguro_backend_conformance::conformance!(maybe COOPERATIVE.as_ref().map(|gpu| subject(gpu, KvDtype::F16)));
}

/// The kernels of real GPUs on a software driver, which has smaller kernels of its own because these compile slowly.
mod hardware {
    use std::sync::LazyLock;

    use super::{Gpu, GpuOptions, KvDtype, Profile, Subject, open_software, subject};

    static HARDWARE: LazyLock<Result<Gpu, String>> = LazyLock::new(|| {
        let options = GpuOptions { profile: Profile::Nvidia, ..GpuOptions::default() };
        open_software(options, "a real GPU has no other kernels")
    });

    fn subject_of_hardware() -> Result<Subject, &'static String> {
        HARDWARE.as_ref().map(|gpu| subject(gpu, KvDtype::F16))
    }

    paguro_backend_conformance::conformance!(maybe subject_of_hardware(); only
        format_f16 format_q2_k format_q4_k format_q5_k format_q6_k format_q8_0
        many_rows long_context batch_invariance joined_rows towers);
}

/// The kernels of Apple's GPUs, in passes as Metal has them.
mod apple {
    use std::sync::LazyLock;

    use super::{Gpu, GpuOptions, KvDtype, Profile, Subject, open_software, subject};

    static APPLE: LazyLock<Result<Gpu, String>> = LazyLock::new(|| {
        let options = GpuOptions { profile: Profile::Apple, ..GpuOptions::default() };
        open_software(options, "a real GPU has kernels of its own")
    });

    fn subject_of_apple() -> Result<Subject, &'static String> {
        APPLE.as_ref().map(|gpu| subject(gpu, KvDtype::F16))
    }

    paguro_backend_conformance::conformance!(maybe subject_of_apple(); only format_q4_k);
}

/// Every kernel with cooperative matrices as plain code, on a software driver: a real GPU has matrices or does not use
/// these kernels, and some drivers compile them for minutes. A device compiles for one test at a time, so there are two
/// devices.
mod emulated {
    use std::sync::LazyLock;

    use super::{Gpu, GpuOptions, KvDtype, Subject, open_software, subject};

    static FOR_PRODUCTS: LazyLock<Result<Gpu, String>> = LazyLock::new(emulated);
    static FOR_ATTENTION: LazyLock<Result<Gpu, String>> = LazyLock::new(emulated);

    fn emulated() -> Result<Gpu, String> {
        let options = GpuOptions { emulated: true, ..GpuOptions::default() };
        open_software(options, "matrices as plain code are for software that plays a GPU")
    }

    fn subject_of(gpu: &Result<Gpu, String>) -> Result<Subject, &String> {
        gpu.as_ref().map(|gpu| subject(gpu, KvDtype::F16))
    }

    paguro_backend_conformance::conformance!(maybe subject_of(&FOR_PRODUCTS); only
        format_f16 format_q4_k format_q8_0 encoder_blocks towers);
    paguro_backend_conformance::conformance!(maybe subject_of(&FOR_ATTENTION); only many_rows long_context bidirectional);
}
