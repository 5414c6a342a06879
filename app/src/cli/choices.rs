//! Values that options take, and the checks that turn a wrong one into a usage error.

use std::{fmt, str::FromStr};

use clap::{Arg, ValueEnum};
use paguro_backend::AttentionMode;
use paguro_engine::EngineOptions;
use serde::{Deserialize, Serialize};

use super::Limit;

/// Attributes that options have in common.
pub trait Attributes {
    /// Shows `values` instead of the possible values.
    fn choice(self, values: &'static str) -> Self;

    /// Accepts the option alone, and with `=true` or `=false`.
    fn boolean(self, help_heading: &'static str) -> Self;
}

impl Attributes for Arg {
    fn choice(self, values: &'static str) -> Self {
        self.value_name(values).hide_possible_values(true)
    }

    fn boolean(self, help_heading: &'static str) -> Self {
        let optional = self.num_args(0..=1).require_equals(true).default_missing_value("true");
        optional.choice("BOOL").help_heading(help_heading)
    }
}

/// A device by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The fastest device: a usable GPU, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU by index.
    Gpu(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "gpu" => Ok(Self::Gpu(0)),
            Some(("gpu", index)) => whole(index).map(Self::Gpu),
            _ => Err("must be auto, cpu, gpu or gpu:N".into()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu(index) => write!(f, "gpu:{index}"),
        }
    }
}

/// Values of `--device`: one device, or several among which the layers of a model are divided, or its engines with `--replicas`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct DeviceList(Vec<Device>);

impl DeviceList {
    /// Returns the devices in the order of the list; there is at least one.
    pub fn all(&self) -> &[Device] {
        &self.0
    }
}

impl Default for DeviceList {
    fn default() -> Self {
        Self(vec![Device::Auto])
    }
}

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let devices: Vec<Device> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if devices.len() > 1 && devices.contains(&Device::Auto) {
            return Err("auto cannot be in a list of devices".into());
        }
        Ok(Self(devices))
    }
}

impl TryFrom<String> for DeviceList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Values of `--split`: the shares of GPUs in the layers of a model, as numbers whose ratios count.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Split(Vec<f64>);

impl Split {
    /// Returns the shares; there are at least two, and some are above zero.
    pub fn shares(&self) -> &[f64] {
        &self.0
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share = |text: &str| text.trim().parse().ok().filter(|share| (0.0..1e9).contains(share));
        let shares: Option<Vec<f64>> = text.split([',', '/']).map(share).collect();
        shares
            .filter(|shares| shares.len() > 1 && shares.iter().any(|share| *share > 0.0))
            .map(Self)
            .ok_or_else(|| "must be a number for each GPU, such as 3,1".to_owned())
    }
}

impl TryFrom<String> for Split {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Values of `--attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attention {
    /// Kernels read pages through the block table.
    Paged,
    /// The reference: copy the pages together, then compute attention.
    Gather,
}

impl From<Attention> for AttentionMode {
    fn from(attention: Attention) -> Self {
        match attention {
            Attention::Paged => AttentionMode::Paged,
            Attention::Gather => AttentionMode::Gather,
        }
    }
}

/// Values of `--kv-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvDtype {
    /// Half precision.
    F16,
    /// Eight bits, with a scale for every 32.
    Q8,
    /// Four bits, with a scale for every 32. Answers get worse, and some models (Qwen 2.5) become useless.
    Q4,
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        })
    }
}

impl From<KvDtype> for paguro_backend::KvDtype {
    fn from(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F16 => Self::F16,
            KvDtype::Q8 => Self::Q8,
            KvDtype::Q4 => Self::Q4,
        }
    }
}

/// Values of `--speculate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Speculate {
    /// Drafts where they make answers faster.
    #[default]
    Auto,
    /// No drafts.
    Off,
    /// Drafts of the head, the assistant or the draft model alone, of this many tokens in every step.
    Model(usize),
}

impl Speculate {
    /// Returns the options of an engine with these drafts.
    pub fn of(self, options: EngineOptions) -> EngineOptions {
        let draft_depth = match self {
            Self::Auto | Self::Off => None,
            Self::Model(depth) => Some(depth),
        };
        EngineOptions { speculate: self != Self::Off, draft_depth, ..options }
    }
}

/// Returns the depth of `model:DEPTH`.
fn model_depth(text: &str) -> Option<usize> {
    let depth = text.strip_prefix("model:")?.parse().ok();
    depth.filter(|depth| (1..=paguro_engine::MOST_BY_MODEL).contains(depth))
}

impl FromStr for Speculate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let most = paguro_engine::MOST_BY_MODEL;
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => model_depth(text)
                .map(Self::Model)
                .ok_or_else(|| format!("must be auto, off, or model:N with N from 1 to {most}")),
        }
    }
}

impl TryFrom<String> for Speculate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Speculate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Model(depth) => write!(f, "model:{depth}"),
        }
    }
}

impl From<Speculate> for String {
    fn from(choice: Speculate) -> Self {
        choice.to_string()
    }
}

/// Values of `bench --speculate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BenchDrafts {
    /// No drafts.
    #[default]
    Off,
    /// Those of the engine.
    Auto,
    /// Those of the model that drafts, of this many tokens in every step.
    Model(usize),
    /// Drafts of the known answer.
    Known {
        /// Chance of each token to be right, in thousandths.
        thousandths: u16,
        /// Number of tokens; `None` lets the engine choose.
        length: Option<usize>,
        /// True if they take the place of a model's drafts.
        of_model: bool,
    },
}

impl FromStr for BenchDrafts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            let most = paguro_engine::MOST_DRAFTED;
            format!(
                "must be off, auto, model:N, a chance such as 0.7, or a chance and a length of at most {most}: 0.7x4, which may \
                 end with @model"
            )
        };
        if let Some(depth) = model_depth(text) {
            return Ok(Self::Model(depth));
        }
        let (text, of_model) = match text.strip_suffix("@model") {
            Some(text) => (text, true),
            None => (text, false),
        };
        let (chance, length) = match text.split_once('x') {
            None if text == "off" && !of_model => return Ok(Self::Off),
            None if text == "auto" && !of_model => return Ok(Self::Auto),
            None => (text, None),
            Some((chance, length)) => (chance, Some(length)),
        };
        let chance =
            chance.parse::<f64>().ok().filter(|chance| (0.0..=1.0).contains(chance)).ok_or_else(wrong)?;
        let within = |length: &usize| (1..=paguro_engine::MOST_DRAFTED).contains(length);
        let length = length.map(|length| length.parse().ok().filter(within).ok_or_else(wrong)).transpose()?;
        Ok(Self::Known { thousandths: (1000.0 * chance).round() as u16, length, of_model })
    }
}

impl fmt::Display for BenchDrafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Model(depth) => write!(f, "model:{depth}"),
            Self::Known { thousandths, length, of_model } => {
                write!(f, "{}", f64::from(thousandths) / 1000.0)?;
                length.map_or(Ok(()), |length| write!(f, "x{length}"))?;
                f.write_str(if of_model { "@model" } else { "" })
            }
        }
    }
}

/// Values of `--numerics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Numerics {
    /// Sums in one order, so that results are bitwise equal in any batch.
    Exact,
    /// Matrix units, if the GPU has them.
    Fast,
}

/// Values of `bench --shape`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShapeName {
    /// TinyLlama's 1.1 billion weights.
    Tinyllama,
    /// Llama 3 with 8 billion weights.
    #[value(name = "llama-8b")]
    Llama8b,
    /// A mixture of 32 experts with 1.0 billion weights, of which a token uses 0.3.
    #[value(name = "small-moe")]
    SmallMoe,
    /// Qwen 3's mixture of 128 experts: 30 billion weights, of which a token uses 3.
    #[value(name = "qwen3-30b-a3b")]
    Qwen3_30b,
    /// OpenAI's mixture of 32 experts: 21 billion weights, of which a token uses 3.6.
    #[value(name = "gpt-oss-20b")]
    GptOss20b,
}

/// Values of `bench --format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShapeFormat {
    /// Half precision.
    #[value(name = "F16")]
    F16,
    /// Eight bits.
    #[value(name = "Q8_0")]
    Q8_0,
    /// Four bits, except for the head.
    #[value(name = "Q4_0")]
    Q4_0,
    /// Llama.cpp's mixture of four and six bits.
    #[value(name = "Q4_K_M")]
    Q4KM,
    /// Experts in MXFP4, the rest in eight bits.
    #[value(name = "MXFP4")]
    Mxfp4,
}

/// Values of `bench --pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pages {
    /// Consecutive pages of a sequence are consecutive in memory.
    Ordered,
    /// Pages are allocated in random order.
    Scattered,
}

/// Values of `--color`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Parses a count.
pub fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "must be a whole number".into())
}

/// Parses a number of layers; `all` is more than any model has.
pub fn layers(text: &str) -> Result<usize, String> {
    match text {
        "all" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "must be a number of layers, or all".into()),
    }
}

/// Parses a TCP port.
pub fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "must be a whole number up to 65535".into())
}

/// Parses a positive count.
pub fn positive(text: &str) -> Result<usize, String> {
    match whole(text)? {
        0 => Err("must be at least 1".into()),
        n => Ok(n),
    }
}

/// Parses a number of tokens of an image.
pub fn image_tokens(text: &str) -> Result<u32, String> {
    match whole(text)? {
        0 => Err("must be at least 1".into()),
        n @ 16_385.. => Err(format!("{n} tokens are more than 16384, which no model has for one image")),
        n => u32::try_from(n).map_err(|_| format!("{n} is too large")),
    }
}

/// Parses the number of answers to one prompt.
pub fn answers(text: &str) -> Result<usize, String> {
    match positive(text)? {
        n @ 129.. => Err(format!("{n} answers are more than 128")),
        n => Ok(n),
    }
}

/// Parses the maximum tokens of an answer, at least 1; -1 is no limit, as is -2, llama.cpp's value for a full context.
pub fn tokens(text: &str) -> Result<Limit<usize>, String> {
    match text {
        "-1" | "-2" => Ok(Limit(None)),
        _ => positive(text).map(|n| Limit(Some(n))).map_err(|rule| rule + ", or -1 for no limit"),
    }
}

/// Parses the window of a perplexity. Half of it is context, so it has at least 4 tokens.
pub fn window(text: &str) -> Result<usize, String> {
    match whole(text)? {
        n @ ..4 => Err(format!("is {n}, and must be at least 4")),
        n => Ok(n),
    }
}

/// Parses a finite number for which `fine` is true; `rule` describes the condition in errors.
fn number(text: &str, fine: impl Fn(f32) -> bool, rule: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(n) if n.is_finite() && fine(n) => Ok(n),
        _ => Err(format!("must be {rule}")),
    }
}

/// Parses a finite number.
pub fn finite(text: &str) -> Result<f32, String> {
    number(text, |_| true, "a number")
}

/// Parses a number of at least 0.
pub fn not_negative(text: &str) -> Result<f32, String> {
    number(text, |n| n >= 0.0, "a number, 0 or greater")
}

/// Parses a number above 0.
pub fn above_zero(text: &str) -> Result<f32, String> {
    number(text, |n| n > 0.0, "a number greater than 0")
}

/// Parses a factor of at least 1.
pub fn at_least_one(text: &str) -> Result<f32, String> {
    number(text, |n| n >= 1.0, "a number, 1 or greater")
}

/// Parses a text with the escapes `\n` and `\t`.
pub fn breaker(text: &str) -> Result<String, String> {
    match text {
        "" => Err("must not be empty; `none` is no text".into()),
        text => Ok(text.replace("\\n", "\n").replace("\\t", "\t")),
    }
}

/// Parses a probability of at least 0.
pub fn share(text: &str) -> Result<f32, String> {
    number(text, |n| (0.0..=1.0).contains(&n), "between 0 and 1")
}

/// Parses a probability above 0, so that some token remains.
pub fn share_above_zero(text: &str) -> Result<f32, String> {
    number(text, |n| n > 0.0 && n <= 1.0, "greater than 0 and at most 1")
}

/// Parses `ID=VALUE`.
pub fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) =
        text.split_once('=').ok_or("must be ID=VALUE, a token id and what to add to its logit")?;
    let id = id.trim().parse().map_err(|_| format!("`{id}` is not a token id"))?;
    Ok((id, finite(value.trim())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_of_their_range_are_refused() {
        assert_eq!(share("0.95"), Ok(0.95));
        for bad in ["1.01", "-0.1", "nan", "inf", "x", ""] {
            assert!(share(bad).is_err(), "{bad}");
        }
        for bad in ["-1", "nan", "inf"] {
            assert!(not_negative(bad).is_err(), "{bad}");
        }
        assert!(above_zero("0").is_err());
        assert!(share_above_zero("0").is_err());
        assert_eq!(share("0"), Ok(0.0));
        assert!(finite("inf").is_err());
        assert!(positive("0").is_err());
        assert!(window("3").is_err());
        assert_eq!(answers("128"), Ok(128));
        assert!(answers("0").is_err());
        assert!(answers("256").is_err());
        assert_eq!(tokens("-1"), Ok(Limit(None)));
        assert_eq!(tokens("7"), Ok(Limit(Some(7))));
        for bad in ["0", "-3", "x"] {
            assert!(tokens(bad).unwrap_err().contains("-1 for no limit"), "{bad}");
        }
    }

    #[test]
    fn devices_have_names() {
        assert_eq!("auto".parse(), Ok(Device::Auto));
        assert_eq!("gpu".parse(), Ok(Device::Gpu(0)));
        assert_eq!("gpu:3".parse(), Ok(Device::Gpu(3)));
        for bad in ["", "tpu", "cpu:0", "gpu:", "gpu:x", "gpu:-1"] {
            assert!(bad.parse::<Device>().is_err(), "{bad}");
        }
        let list = "gpu:1,cpu".parse::<DeviceList>().unwrap();
        assert_eq!(list.all(), [Device::Gpu(1), Device::Cpu]);
        for bad in ["", "gpu,", "auto,cpu"] {
            assert!(bad.parse::<DeviceList>().is_err(), "{bad}");
        }
        assert_eq!("3,1".parse::<Split>().unwrap().shares(), [3.0, 1.0]);
        assert_eq!("0.5/0/2".parse::<Split>().unwrap().shares(), [0.5, 0.0, 2.0]);
        for bad in ["", "3", "0,0", "1,-1", "1,nan", "a,b"] {
            assert!(bad.parse::<Split>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bias_is_an_id_and_a_value() {
        assert_eq!(bias("12=-1.5"), Ok((12, -1.5)));
        for bad in ["12", "a=1", "1=nan", "1=-inf", "-1=2", "=2", "1="] {
            assert!(bias(bad).is_err(), "{bad}");
        }
    }
}
