//! A kernel that reads memory and does nothing else, to measure the read bandwidth of a machine.

use crate::{isa::simd_kernels, simd::Simd};

simd_kernels! {
    /// Reads, and does nothing else.
    pub struct ProbeKernels {
        /// Reads all of it, in whole 256 bytes.
        fn read(bytes: &[u8]) -> u8 = read;
    }
}

/// See [`ProbeKernels::read`]. Four independent chains, so that only memory is waited for.
#[inline(always)]
fn read<S: Simd>(s: S, bytes: &[u8]) -> u8 {
    let mut all = [s.splat_u8(0); 4];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (all, line) in all.iter_mut().zip(lines) {
            *all = s.or_u8(*all, s.load_u8(line));
        }
    }
    let mut out = [0; 64];
    s.store_u8(s.or_u8(s.or_u8(all[0], all[1]), s.or_u8(all[2], all[3])), &mut out);
    out.iter().fold(0, |a, &b| a | b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn every_byte_is_read() {
        for isa in Isa::supported() {
            let kernels = ProbeKernels::new(isa);
            let mut bytes = vec![1; 2048];
            assert_eq!(kernels.read(&bytes), 1);
            for at in (0..2048).step_by(61) {
                bytes[at] = 4;
                assert_eq!(kernels.read(&bytes), 5);
                bytes[at] = 1;
            }
        }
    }
}
