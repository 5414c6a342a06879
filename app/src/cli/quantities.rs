//! Sizes and times on the command line and in files of settings.

use std::{str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, de};

/// A number of bytes: `1048576`, `1MiB`, `1.5GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

/// A time: `90`, `90s`, `1.5m`, `500ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub Duration);

/// The [`Time`] of a step: at most [`MOST_STEP_TIME`], beyond which a number without a unit was meant as milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime(pub Duration);

/// Most time of a step.
const MOST_STEP_TIME: Duration = Duration::from_secs(10);

/// A [`Time`], or `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive(pub Option<Duration>);

/// A number of [`Bytes`], or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeOrOff(pub Option<u64>);

/// Slots for experts in each layer, see `--expert-slots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSlots {
    /// None if the model fits, and as many as fit otherwise.
    #[default]
    Auto,
    /// None: all experts are on the device.
    All,
    /// As many as a token uses.
    Least,
    /// This number.
    Experts(usize),
    /// As many as take this memory in all layers together.
    Bytes(u64),
    /// As many as take the memory of the experts of all layers but these.
    Without(usize),
}

impl FromStr for ExpertSlots {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || {
            "must be auto, all, least, a number of experts, all-N for N layers less, or bytes such as 8GB"
                .to_owned()
        };
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            "least" => Ok(Self::Least),
            _ => match (text.strip_prefix("all-"), text.parse()) {
                (Some(layers), _) => layers.parse().map(Self::Without).map_err(|_| rule()),
                (None, Ok(slots)) => Ok(Self::Experts(slots)),
                (None, Err(_)) => {
                    text.parse().map(|Bytes(bytes)| Self::Bytes(bytes)).map_err(|_: String| rule())
                }
            },
        }
    }
}

/// Splits a text into a number and its unit.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    Some((number, text[end..].trim()))
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || "must be a number of bytes, such as 1048576, 512MiB or 8GB".to_owned();
        let (number, unit) = split(text).ok_or_else(rule)?;
        let scale = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024f64.powi(2),
            "g" | "gib" => 1024f64.powi(3),
            "t" | "tib" => 1024f64.powi(4),
            _ => return Err(rule()),
        };
        Ok(Self((number * scale) as u64))
    }
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || "must be a time, such as 250ms, 90s, 5m or 1h".to_owned();
        let (number, unit) = split(text).ok_or_else(rule)?;
        let seconds = match unit {
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return Err(rule()),
        };
        Duration::try_from_secs_f64(number * seconds).map(Self).map_err(|_| rule())
    }
}

impl FromStr for StepTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Time(time) = text.parse()?;
        match time <= MOST_STEP_TIME {
            true => Ok(Self(time)),
            false => Err("must be at most 10s; 100 milliseconds are 100ms".to_owned()),
        }
    }
}

impl FromStr for KeepAlive {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "forever" | "-1" => Ok(Self(None)),
            _ => {
                text.parse().map(|Time(time)| Self(Some(time))).map_err(|rule: String| rule + ", or forever")
            }
        }
    }
}

impl FromStr for SizeOrOff {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" | "0" => Ok(Self(None)),
            _ => text.parse().map(|Bytes(bytes)| Self(Some(bytes))).map_err(|rule: String| rule + ", or off"),
        }
    }
}

/// Deserializes a value from its command-line form or a plain number.
fn from_text<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Text<T>(std::marker::PhantomData<T>);
    impl<T: FromStr<Err = String>> de::Visitor<'_> for Text<T> {
        type Value = T;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a number, or a number with a unit in quotes")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(|rule| E::custom(format!("{rule}, not {text:?}")))
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
    }
    deserializer.deserialize_any(Text(std::marker::PhantomData))
}

macro_rules! deserialize_from_text {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_text(deserializer)
            }
        }
    )*};
}

deserialize_from_text!(Bytes, ExpertSlots, SizeOrOff, Time, StepTime, KeepAlive);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_units() {
        let bytes = |text: &str| text.parse::<Bytes>().map(|bytes| bytes.0);
        assert_eq!(bytes("1048576"), Ok(1 << 20));
        assert_eq!(bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(bytes("8GB"), Ok(8_000_000_000));
        for wrong in ["", "GB", "-1", "1 apple", "1.2.3", "1e3"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        let time = |text: &str| text.parse::<Time>().map(|time| time.0.as_millis());
        assert_eq!(time("90"), Ok(90_000));
        assert_eq!(time("1.5m"), Ok(90_000));
        assert_eq!(time("250ms"), Ok(250));
        assert!(time("soon").is_err() && time("-3s").is_err());
        let step = |text: &str| text.parse::<StepTime>().map(|time| time.0.as_millis());
        assert_eq!((step("100ms"), step("10")), (Ok(100), Ok(10_000)));
        assert!(step("100").unwrap_err().ends_with("100ms"));
        assert_eq!("forever".parse(), Ok(KeepAlive(None)));
        assert_eq!("0".parse(), Ok(KeepAlive(Some(Duration::ZERO))));
        let slots = |text: &str| text.parse::<ExpertSlots>();
        assert_eq!(
            (slots("64"), slots("all-36")),
            (Ok(ExpertSlots::Experts(64)), Ok(ExpertSlots::Without(36)))
        );
        assert_eq!(slots("8GB"), Ok(ExpertSlots::Bytes(8_000_000_000)));
        assert!(slots("all-").is_err() && slots("many").is_err() && slots("-3").is_err());
        let disk = |text: &str| text.parse::<SizeOrOff>().map(|size| size.0);
        assert_eq!((disk("off"), disk("1GB")), (Ok(None), Ok(Some(1_000_000_000))));
        assert!(disk("on").unwrap_err().ends_with(", or off"));
    }
}
