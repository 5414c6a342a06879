//! What the machine is and how fast it reads memory: the ceiling of every decode.

use std::{hint::black_box, io, time::Instant};

use memmap2::MmapMut;

use crate::team::{Portions, Team};

/// Bytes that one round of the probe reads: far more than any cache holds.
const PROBE_BYTES: usize = 1 << 29;
const CHUNK: usize = 1 << 20;

/// Read bandwidth of this machine with `threads` threads, in bytes per second: the median of `rounds` rounds over
/// 512 MiB in huge pages where the system gives them, as weights are.
///
/// # Errors
/// If there is no memory for it, or no threads.
pub fn read_bandwidth(threads: usize, rounds: usize) -> io::Result<f64> {
    let mut memory = MmapMut::map_anon(PROBE_BYTES)?;
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    memory.fill(1);
    let mut team = Team::new(threads)?;
    let mut rates: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let start = Instant::now();
            team.share(PROBE_BYTES / CHUNK, Portions::Guided(1), |_, chunks| {
                for chunk in chunks {
                    black_box(sum(&memory[chunk * CHUNK..][..CHUNK]));
                }
            });
            PROBE_BYTES as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

/// A sum that reads every byte as fast as memory gives them: eight independent chains of 64-byte rows.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [[0_u64; 8]; 8];
    for block in bytes.as_chunks::<512>().0 {
        for (sums, line) in sums.iter_mut().zip(block.as_chunks::<64>().0) {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
            }
        }
    }
    sums.as_flattened().iter().fold(0, |a, &b| a.wrapping_add(b))
}

/// The processor's name, as the system tells it.
pub fn processor_name() -> String {
    let from_file = || {
        let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    from_file().unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Bytes that could be taken without swapping. Where the system does not say (it does on Linux), half of the address
/// space: allocation then fails by itself.
pub fn memory_available() -> u64 {
    let from_file = || {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kilobytes * 1024)
    };
    from_file().unwrap_or(isize::MAX as u64)
}
