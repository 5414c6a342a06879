//! The instruction set, chosen once at load.

use std::fmt;

/// An instruction set of this machine. Values are created only by [`Isa::detect`], [`Isa::supported`] and
/// [`Isa::from_name`], which check the processor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

/// The instruction sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Scalar,
}

impl Isa {
    /// Returns the best one.
    pub fn detect() -> Self {
        Self::supported()[0]
    }

    /// Returns all of this machine, best first; the last one is `scalar`.
    pub fn supported() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use crate::simd::{Avx2, Avx512};
            all.extend(Avx512::detect().map(|_| Self(Kind::Avx512)));
            all.extend(Avx2::detect().map(|_| Self(Kind::Avx2)));
        }
        #[cfg(target_arch = "aarch64")]
        {
            use crate::simd::{NeonBase, NeonDot, NeonI8mm};
            all.extend(NeonI8mm::detect().map(|_| Self(Kind::NeonI8mm)));
            all.extend(NeonDot::detect().map(|_| Self(Kind::NeonDot)));
            all.extend(NeonBase::detect().map(|_| Self(Kind::Neon)));
        }
        all.push(Self(Kind::Scalar));
        all
    }

    /// Returns the one with this name, if this machine has it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::supported().into_iter().find(|isa| isa.name() == name)
    }

    /// Returns the name for statistics and options.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::NeonI8mm => "neoni8mm",
            #[cfg(target_arch = "aarch64")]
            Kind::NeonDot => "neondot",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            Kind::Scalar => "scalar",
        }
    }

    /// For `simd_kernels!`.
    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Declares a table of kernels and instantiates each for every instruction set.
///
/// ```text
/// simd_kernels! {
///     /// Norms.
///     pub struct NormKernels {
///         /// `out = x / rms(x) * weight`
///         fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = kernels::rms_norm;
///     }
/// }
/// // where: #[inline(always)] pub fn rms_norm<S: Simd>(s: S, x: &[f32], ...) { ... }
/// let norms = NormKernels::new(Isa::detect());
/// norms.rms_norm(x, weight, 1e-6, out);
/// ```
///
/// A kernel that is itself generic beyond `S` is instantiated by giving the path of a thin `#[inline(always)]`
/// function.
macro_rules! simd_kernels {
    (
        $(#[$table_doc:meta])*
        $vis:vis struct $Table:ident {
            $( $(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $path:path; )*
        }
    ) => {
        $(#[$table_doc])*
        #[derive(Clone, Copy)]
        #[allow(clippy::type_complexity)]
        $vis struct $Table {
            $( $name: unsafe fn($($ty),*) $(-> $ret)?, )*
        }

        impl $Table {
            /// The kernels for `isa`.
            $vis fn new(isa: $crate::isa::Isa) -> Self {
                use $crate::isa::Kind;
                match isa.kind() {
                    #[cfg(target_arch = "x86_64")]
                    Kind::Avx512 => Self {
                        $($name: {
                            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                // SAFETY: only reached through a table made for a detected `Isa`.
                                $path(unsafe { $crate::simd::Avx512::assume() }, $($arg),*)
                            }
                            instance
                        },)*
                    },
                    #[cfg(target_arch = "x86_64")]
                    Kind::Avx2 => Self {
                        $($name: {
                            #[target_feature(enable = "avx2,fma,f16c")]
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                // SAFETY: only reached through a table made for a detected `Isa`.
                                $path(unsafe { $crate::simd::Avx2::assume() }, $($arg),*)
                            }
                            instance
                        },)*
                    },
                    #[cfg(target_arch = "aarch64")]
                    Kind::NeonI8mm => Self {
                        $($name: {
                            #[target_feature(enable = "neon,i8mm")]
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                // SAFETY: only reached through a table made for a detected `Isa`.
                                $path(unsafe { $crate::simd::NeonI8mm::assume() }, $($arg),*)
                            }
                            instance
                        },)*
                    },
                    #[cfg(target_arch = "aarch64")]
                    Kind::NeonDot => Self {
                        $($name: {
                            #[target_feature(enable = "neon,dotprod")]
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                // SAFETY: only reached through a table made for a detected `Isa`.
                                $path(unsafe { $crate::simd::NeonDot::assume() }, $($arg),*)
                            }
                            instance
                        },)*
                    },
                    #[cfg(target_arch = "aarch64")]
                    Kind::Neon => Self {
                        $($name: {
                            #[target_feature(enable = "neon")]
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                // SAFETY: only reached through a table made for a detected `Isa`.
                                $path(unsafe { $crate::simd::NeonBase::assume() }, $($arg),*)
                            }
                            instance
                        },)*
                    },
                    Kind::Scalar => Self {
                        $($name: {
                            fn instance($($arg: $ty),*) $(-> $ret)? {
                                $path($crate::simd::Scalar, $($arg),*)
                            }
                            instance
                        },)*
                    },
                }
            }

            $(
                $(#[$doc])*
                #[inline]
                #[allow(clippy::too_many_arguments)]
                $vis fn $name(&self, $($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: `new` took the pointer for an `Isa`, which exists only where it was detected.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

pub(crate) use simd_kernels;

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment variable names the expected instruction set of a known (or emulated) machine, because defects of
    /// a kernel that is never selected are never found.
    #[test]
    fn the_best_is_detected() {
        let best = Isa::detect();
        assert_eq!(Isa::from_name(best.name()), Some(best));
        if let Ok(expected) = std::env::var("PAGURO_EXPECT_ISA") {
            assert_eq!(best.name(), expected);
        }
    }
}
