use super::*;

const GIB: u64 = 1 << 30;

/// Returns an adapter with the reported memory in MiB; `free` of -1 represents a driver that reports none.
fn facts(
    name: &str,
    (backend, driver, os): (Backend, &str, &'static str),
    device_type: DeviceType,
    [vendor, device]: [u32; 2],
    subgroups: [u32; 2],
    [total, free]: [i64; 2],
) -> Facts {
    let mib = |mib: i64| (mib as u64) << 20;
    let metal = backend == Backend::Metal;
    Facts {
        name: name.into(),
        driver: driver.into(),
        backend,
        device_type,
        vendor,
        device,
        subgroups,
        threads: 1024,
        // Metal's largest buffer is 9/16 of main memory; most Vulkan drivers allow bindings of 2 or 4 GiB.
        buffers: if metal { [mib(total), mib(total)] } else { [1 << 50, 4 * GIB - 1] },
        memory: Memory { total: mib(total), free: (free >= 0).then(|| mib(free)), host: mib(32_000) },
        processors: None,
        os,
    }
}

fn apple(name: &str, working_set: i64) -> Facts {
    let metal = (Backend::Metal, "", "macos");
    facts(name, metal, DeviceType::IntegratedGpu, [0, 0], [4, 64], [working_set, working_set])
}

/// Main memory of Macs in GiB, and Metal's recommended working set in MiB.
const MACS: [(&str, u64, i64); 9] = [
    ("Apple M1", 8, 5461),
    ("Apple M2", 16, 10_922),
    ("Apple M4", 24, 16_384),
    ("Apple M1 Max", 32, 21_845),
    ("Apple M3 Max", 64, 49_152),
    ("Apple M2 Max", 96, 73_728),
    ("Apple M4 Max", 128, 98_304),
    ("Apple M2 Ultra", 192, 147_456),
    ("Apple M3 Ultra", 512, 458_752),
];

#[test]
fn macs_lend_most_of_their_memory() {
    for (name, main, working_set) in MACS {
        let rules = apple(name, working_set).rules();
        let share = rules.bytes_free as f64 / (main * GIB) as f64;
        assert!((0.6..0.9).contains(&share), "{name} with {main} GiB lends {share}");
        assert_eq!((rules.not_automatic, rules.refused), (None, None), "{name}");
        assert_eq!((rules.subgroup, rules.has_one_subgroup, rules.most_threads), (32, true, 256));
        assert!(!rules.handoff && !rules.keeps_order && rules.submission.is_some());
        assert!(rules.binding_limit < 4 * GIB, "kernels index with 32 bits");
    }
    // The share of `serve` holds an 8B model of four bits with its pages on 16 GB, and 70B models of 40 GB on 64 GB.
    let budget = |working_set: i64| apple("Apple M", working_set).rules().bytes_free / 10 * 8;
    assert!(budget(10_922) > 6_000_000_000 && budget(49_152) > 38_000_000_000);
}

#[test]
fn what_other_programs_hold_is_not_free() {
    let linux = (Backend::Vulkan, "NVIDIA", "linux");
    let card = |free: i64| {
        facts("card", linux, DeviceType::DiscreteGpu, [NVIDIA, 0x2684], [32, 32], [24_564, free]).rules()
    };
    assert_eq!(card(24_000).bytes_free, (24_000 << 20) / 20 * 19);
    assert_eq!(card(-1).bytes_free, (24_564 << 20) / 10 * 9);
    assert_eq!(card(23_000).not_automatic, None);
    let reason = card(1_000).not_automatic.expect("a card that is full");
    assert!(reason.contains("MB"), "{reason}");
}

#[test]
fn automatic_choices() {
    use DeviceType::{Cpu, DiscreteGpu, IntegratedGpu};
    let (vulkan, windows) = ((Backend::Vulkan, "radv", "linux"), (Backend::Vulkan, "AMD", "windows"));
    let anv = (Backend::Vulkan, "Intel open-source Mesa driver", "linux");
    let lavapipe = (Backend::Vulkan, "llvmpipe", "linux");
    let metal = (Backend::Metal, "", "macos");
    for (facts, automatic, refused, short) in [
        // A card of 2 GB runs small models; larger ones use the CPU.
        (
            facts("2 GB card", vulkan, DiscreteGpu, [0x1002, 0x67df], [64, 64], [2048, 2040]),
            true,
            false,
            false,
        ),
        (
            facts("1 GB card", vulkan, DiscreteGpu, [0x1002, 0x6611], [64, 64], [1024, 1020]),
            false,
            false,
            false,
        ),
        (
            facts("RX 7900", vulkan, DiscreteGpu, [0x1002, 0x744c], [32, 64], [24_560, 24_000]),
            true,
            false,
            false,
        ),
        (
            facts("RX 7900", windows, DiscreteGpu, [0x1002, 0x744c], [32, 64], [24_560, 24_000]),
            true,
            false,
            true,
        ),
        (
            facts("APU, carve-out", vulkan, IntegratedGpu, [0x1002, 0x1638], [64, 64], [512, 500]),
            false,
            false,
            true,
        ),
        (
            facts("APU, 0.25 GB", vulkan, IntegratedGpu, [0x1002, 0x15d8], [64, 64], [256, -1]),
            false,
            false,
            true,
        ),
        (facts("Arc", anv, DiscreteGpu, [0x8086, 0x56a0], [8, 32], [16_384, 16_000]), true, false, false),
        (facts("UHD", anv, IntegratedGpu, [0x8086, 0x9bc5], [8, 32], [16_000, 12_000]), true, false, true),
        (facts("llvmpipe", lavapipe, Cpu, [0x10005, 0], [8, 8], [24_000, 24_000]), false, false, false),
        (facts("AMD Radeon Pro 5500M", metal, DiscreteGpu, [0, 0], [4, 64], [8176, 8176]), false, true, true),
        (facts("Intel UHD 630", metal, IntegratedGpu, [0, 0], [4, 64], [1536, 1536]), false, true, true),
    ] {
        let rules = facts.rules();
        assert_eq!(rules.not_automatic.is_none(), automatic, "{}: {rules:?}", facts.name);
        assert_eq!(rules.refused.is_some(), refused, "{}", facts.name);
        assert_eq!(rules.submission.is_some(), short, "{}", facts.name);
        assert!(!rules.handoff && rules.most_threads == 256, "{}", facts.name);
        assert_eq!(rules.keeps_order, facts.backend != Backend::Metal);
    }
}

#[test]
fn only_nvidias_own_driver_uses_handoff() {
    let gpu = |device: u32, driver: &str, os: &'static str| {
        let facts = facts(
            "",
            (Backend::Vulkan, driver, os),
            DeviceType::DiscreteGpu,
            [NVIDIA, device],
            [32; 2],
            [8000, -1],
        );
        let rules = facts.rules();
        assert_eq!(rules.most_threads, 1024);
        rules.handoff
    };
    // H200, H100, RTX 2080 (Turing), RTX 4090.
    for device in [0x2335, 0x2330, 0x1e82, 0x2684] {
        assert!(gpu(device, "NVIDIA", "linux"), "{device:x}");
        assert!(!gpu(device, "NVK", "linux") && !gpu(device, "NVIDIA", "windows"), "{device:x}");
    }
    // GTX 1080, V100 and GTX 960 are older.
    for device in [0x1b80, 0x1db4, 0x1401] {
        assert!(!gpu(device, "NVIDIA", "linux"), "{device:x}");
    }
}
