//! Workgroup memory of consecutive kernels on Metal.
//!
//! Metal receives the length of each workgroup array of a kernel by index, and wgpu does not reset the lengths of a
//! previous kernel with more arrays. If Metal counts those as well, a small kernel after a large one in a pass exceeds
//! the 32 KiB of a kernel. So a pass ends where the remaining lengths would exceed it.

use wgpu::naga::{
    AddressSpace,
    front::wgsl,
    valid::{Capabilities, ValidationFlags, Validator},
};

/// Bytes of workgroup memory on all of Apple's GPUs.
pub const MOST: u32 = 32 << 10;

/// Returns the lengths of a kernel's workgroup arrays, in the order in which wgpu numbers them.
///
/// # Panics
/// If the kernel is not well-formed: it is part of this crate.
pub fn lengths(name: &str, source: &str) -> Vec<u32> {
    let module = wgsl::parse_str(source)
        .unwrap_or_else(|error| panic!("kernel {name}: {}", error.emit_to_string(source)));
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|error| panic!("kernel {name}: {}", error.emit_to_string(source)));
    let entry = info.get_entry_point(0);
    let used = module
        .global_variables
        .iter()
        .filter(|(handle, var)| var.space == AddressSpace::WorkGroup && !entry[*handle].is_empty());
    used.map(|(_, var)| module.types[var.ty].inner.size(module.to_ctx()).next_multiple_of(16)).collect()
}

/// Splits launches into passes that stay within [`MOST`].
pub fn passes<T>(launches: &[T], lengths: impl Fn(&T) -> &[u32]) -> Vec<&[T]> {
    let (mut passes, mut first) = (Vec::new(), 0);
    let mut left: Vec<u32> = Vec::new();
    for (index, launch) in launches.iter().enumerate() {
        let own = lengths(launch);
        let behind = left.get(own.len()..).unwrap_or_default();
        if own.iter().chain(behind).sum::<u32>() > MOST {
            passes.push(&launches[first..index]);
            (first, left) = (index, Vec::new());
        }
        left.resize(left.len().max(own.len()), 0);
        left[..own.len()].copy_from_slice(own);
    }
    passes.push(&launches[first..]);
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_end_before_too_much_is_left_behind() {
        // Attention of an 8B model has nine arrays, matmuls have two.
        let attend = [16_384, 8192, 1024, 512, 512, 256, 256, 256, 64].as_slice();
        let (matmul, small) = ([4096, 6144].as_slice(), [64].as_slice());
        let split = |launches: &[&[u32]]| -> Vec<usize> {
            passes(launches, |lengths| lengths).iter().map(|pass| pass.len()).collect()
        };
        assert_eq!(split(&[small, attend, small, matmul]), [4]);
        let wide = [4096, 2048, 4096, 4096, 4096, 4096, 4096, 512, 512].as_slice();
        assert!(wide.iter().sum::<u32>() < MOST);
        // 4096 + 6144 and the other seven remaining arrays are 31,744 bytes; another 2048 exceed the limit.
        assert_eq!(split(&[wide, matmul, small]), [3]);
        assert_eq!(split(&[wide, &[8192, 8192], small, wide]), [1, 3]);
        assert_eq!(split(&[]), [0]);
    }

    #[test]
    fn lengths_are_of_arrays_that_are_used() {
        let source = "var<workgroup> a: array<f32, 5>;\nvar<workgroup> unused: array<f32, 99>;\nvar<workgroup> b: array<vec4<f32>, 8>;\n\
                      @compute @workgroup_size(4)\nfn main(@builtin(local_invocation_index) i: u32) {\n  a[i] = 1.0;\n  \
                      workgroupBarrier();\n  b[i] = vec4<f32>(a[3u - i]);\n}\n";
        assert_eq!(lengths("test", source), [32, 128]);
    }
}
