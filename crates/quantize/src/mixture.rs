//! Mixtures of formats: which tensor of a file gets which format.
//!
//! The rules are those of llama-quant.cpp. They depend on a tensor's part in the model, on its layer, and on a few numbers of the
//! model: matrices whose errors cost most get more bits.

mod rules;

use std::{fmt, str::FromStr};

use paguro_backend::WeightFormat::{self, *};
use paguro_model::gguf::file_type_number;

use self::rules::Role;
pub(crate) use self::rules::{Chooser, is_quantized, layer_of};

/// Declares the mixtures: the name and the format of tensors without a rule of their own.
macro_rules! mixtures {
    ($($name:ident: $base:expr, $about:literal;)*) => {
        /// A mixture, named as people name files.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types)] // the field writes Q4_K_M
        #[allow(missing_docs)] // `about` describes each
        pub enum Mixture {
            $($name,)*
        }

        impl Mixture {
            /// Every mixture that can be written, from many bits to few.
            pub const ALL: &[Mixture] = &[$(Self::$name),*];

            /// Returns the name: `Q4_K_M`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Returns the mixture in a few words.
            pub const fn about(self) -> &'static str {
                match self {
                    $(Self::$name => $about,)*
                }
            }

            /// Returns the format of tensors without a rule of their own.
            pub const fn base(self) -> WeightFormat {
                match self {
                    $(Self::$name => $base,)*
                }
            }
        }
    };
}

mixtures! {
    F32: F32, "no quantization";
    BF16: BF16, "no quantization";
    F16: F16, "no quantization";
    Q8_0: Q8_0, "eight bits, hardly any loss";
    Q6_K: Q6_K, "six bits";
    Q5_K_M: Q5_K, "five bits, some matrices in six";
    Q5_K_S: Q5_K, "five bits";
    Q5_1: Q5_1, "five bits, an old format";
    Q5_0: Q5_0, "five bits, an old format";
    Q4_K_M: Q4_K, "four bits, some matrices in six: the usual choice";
    Q4_K_S: Q4_K, "four bits, the first layers in five";
    IQ4_NL: IQ4_NL, "four bits from a table";
    IQ4_XS: IQ4_XS, "four bits from a table, smaller";
    Q4_1: Q4_1, "four bits, an old format";
    Q4_0: Q4_0, "four bits, an old format";
    MXFP4: MXFP4, "experts in four bits, other matrices in eight";
    IQ3_M: IQ3_S, "three bits from a table, some matrices in four";
    IQ3_S: IQ3_S, "three bits from a table";
    IQ3_XS: IQ3_S, "three bits from a table, some matrices in less; needs an importance matrix";
    IQ3_XXS: IQ3_XXS, "three bits from a table, smaller; needs an importance matrix";
    Q3_K_L: Q3_K, "three bits, some matrices in five";
    Q3_K_M: Q3_K, "three bits, some matrices in four or five";
    Q3_K_S: Q3_K, "three bits";
    Q2_K: Q2_K, "two bits, some matrices in three or four";
    Q2_K_S: Q2_K, "two bits; needs an importance matrix";
    IQ2_M: IQ2_S, "two bits from a table, some matrices in three; needs an importance matrix";
    IQ2_S: IQ2_XS, "two bits from a table, some matrices in three; needs an importance matrix";
    IQ2_XS: IQ2_XS, "two bits from a table; needs an importance matrix";
    IQ2_XXS: IQ2_XXS, "two bits from a table, smaller; needs an importance matrix";
    IQ1_M: IQ1_M, "less than two bits from a table; needs an importance matrix";
    IQ1_S: IQ1_S, "less than two bits from a table, smaller; needs an importance matrix";
    TQ2_0: TQ2_0, "for models trained with weights of -1, 0 and 1";
    TQ1_0: TQ1_0, "for models trained with weights of -1, 0 and 1, smaller";
    Q2_0: Q2_0, "for models trained with weights of four values";
    Q1_0: Q1_0, "for models trained with weights of two values";
}

impl Mixture {
    /// Returns the number that files have as `general.file_type`.
    pub fn file_type(self) -> u32 {
        file_type_number(self.name()).unwrap_or(0)
    }

    /// Returns true if a tensor of this format makes no sense without an importance matrix.
    fn needs_importance(self, name: &str, format: WeightFormat) -> bool {
        let low = matches!(format, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS)
            || self == Self::Q2_K_S && format == Q2_K;
        low && !matches!(Role::of(name), Role::Embedding | Role::Output)
    }
}

impl fmt::Display for Mixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mixture {
    type Err = UnknownMixture;

    /// By name, in any case. Names of formats that stand for a mixture, such as `Q4_K`, are understood.
    fn from_str(name: &str) -> Result<Self, UnknownMixture> {
        const SHORT: [(&str, &str); 4] =
            [("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M"), ("MXFP4_MOE", "MXFP4")];
        let short = SHORT.iter().find(|short| short.0.eq_ignore_ascii_case(name));
        let name = short.map_or(name, |short| short.1);
        let known = Self::ALL.iter().find(|mixture| mixture.name().eq_ignore_ascii_case(name));
        known.copied().ok_or_else(|| UnknownMixture { name: name.to_owned() })
    }
}

/// Not the name of a mixture that can be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownMixture {
    /// The given name.
    pub name: String,
}

impl std::error::Error for UnknownMixture {}

impl fmt::Display for UnknownMixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Mixture::ALL.iter().map(|mixture| mixture.name()).collect();
        write!(f, "`{}` cannot be written; formats are {}", self.name, names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_and_numbered() {
        for &mixture in Mixture::ALL {
            assert_eq!(mixture.name().to_lowercase().parse(), Ok(mixture));
            assert!(file_type_number(mixture.name()).is_some(), "{mixture}");
        }
        assert_eq!("q4_k".parse(), Ok(Mixture::Q4_K_M));
        assert_eq!("mxfp4_moe".parse(), Ok(Mixture::MXFP4));
        assert!("NVFP4".parse::<Mixture>().unwrap_err().to_string().contains("Q4_K_M"));
    }
}
