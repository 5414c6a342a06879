//! `keep_alive`: time that a model stays loaded, in seconds or as a duration in Go's format.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

/// Time that a model stays loaded after its last use; `None` for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(value_type = Value)]
pub struct KeepAlive(pub Option<Duration>);

/// A hundred years. Adding a longer time to the current time could overflow.
pub const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

impl<'de> Deserialize<'de> for KeepAlive {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("seconds, or a duration such as \"5m\" or \"1h30m\"; below 0 is for ever")
            .i64(|seconds| Self::of_seconds(seconds as f64).map_err(Error::custom))
            .u64(|seconds| Self::of_seconds(seconds as f64).map_err(Error::custom))
            .f64(|seconds| Self::of_seconds(seconds).map_err(Error::custom))
            .string(|text| {
                let seconds = parse(text).ok_or_else(|| {
                    let problem = format!("`{text}` is no duration; \"5m\", \"1h30m\" or \"-1s\" would be");
                    Error::custom(problem)
                })?;
                Self::of_seconds(seconds).map_err(Error::custom)
            })
            .deserialize(deserializer)
    }
}

impl KeepAlive {
    fn of_seconds(seconds: f64) -> Result<Self, &'static str> {
        if seconds < 0.0 {
            return Ok(Self(None));
        }
        let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| *time <= LONGEST);
        time.map(|time| Self(Some(time))).ok_or("longer than a hundred years; below 0 is for ever")
    }

    /// Returns true if the model is to be unloaded at once.
    pub fn unloads(self) -> bool {
        self.0 == Some(Duration::ZERO)
    }
}

/// Parses numbers with units to seconds. Only a number of at most 0 may stand without a unit.
fn parse(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if let Ok(number) = rest.parse::<u64>() {
        return (number == 0 || sign < 0.0).then_some(sign * number as f64);
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(digits);
        let unit = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit);
        let unit = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * unit;
        rest = after;
    }
    (!text.is_empty()).then_some(sign * seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_seconds_or_go_s() {
        let read = |json: &str| match serde_json::from_str::<KeepAlive>(json) {
            Ok(KeepAlive(Some(time))) => format!("{time:?}"),
            Ok(KeepAlive(None)) => "for ever".into(),
            Err(error) => error.to_string().split(" at line").next().unwrap_or_default().to_owned(),
        };
        let cases = [
            ("300", "300s"),
            ("0", "0ns"),
            ("1.5", "1.5s"),
            ("-1", "for ever"),
            ("\"5m\"", "300s"),
            ("\"1h30m\"", "5400s"),
            ("\"250ms\"", "250ms"),
            ("\"-1\"", "for ever"),
            ("\"-1m\"", "for ever"),
            ("\"0\"", "0ns"),
            ("\"5\"", "`5` is no duration; \"5m\", \"1h30m\" or \"-1s\" would be"),
            ("\"\"", "`` is no duration; \"5m\", \"1h30m\" or \"-1s\" would be"),
            ("3153600000", "3153600000s"),
            ("3153600001", "longer than a hundred years; below 0 is for ever"),
            ("18446744073709551615", "longer than a hundred years; below 0 is for ever"),
            ("\"1e9h\"", "`1e9h` is no duration; \"5m\", \"1h30m\" or \"-1s\" would be"),
            ("\"9999999999999999h\"", "longer than a hundred years; below 0 is for ever"),
            ("1e300", "longer than a hundred years; below 0 is for ever"),
        ];
        for (json, expected) in cases {
            assert_eq!(read(json), expected, "{json}");
        }
    }
}
