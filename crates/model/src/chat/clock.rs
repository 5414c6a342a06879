//! `strftime_now(format)`: Python's `datetime.now().strftime(format)`.

use std::fmt::Write;

/// A moment, as a clock on the wall shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallTime {
    /// Seconds since the beginning of 1970 on this clock: Unix time plus the offset of the time zone.
    pub seconds: i64,
}

impl WallTime {
    /// Returns the system's clock in the local time zone: `TZ`, or else that of the system, or else UTC.
    pub fn now() -> Self {
        let now = jiff::Zoned::now();
        Self { seconds: now.timestamp().as_second() + i64::from(now.offset().seconds()) }
    }

    /// Formats as C's `strftime` does in the C locale; unknown directives stay as they are.
    pub fn format(self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            // GNU's `%-d` and `%_d`: no padding, or spaces.
            let mut directive = rest.next();
            let flag = directive.filter(|flag| matches!(flag, '-' | '_' | '0'));
            if flag.is_some() {
                directive = rest.next();
            }
            match directive {
                Some(directive) => self.directive(&mut out, directive, flag),
                None => out.push('%'),
            }
        }
        out
    }

    fn directive(self, out: &mut String, directive: char, flag: Option<char>) {
        let (days, time) = (self.seconds.div_euclid(86_400), self.seconds.rem_euclid(86_400));
        let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
        let (year, month, day) = civil(days);
        let weekday = (days + 4).rem_euclid(7); // 1970 began on a Thursday; Sunday is 0.
        let year_day = days - days_before(year, 1, 1); // from 0
        let hour12 = (hour + 11) % 12 + 1;
        let number = |out: &mut String, value: i64, width: usize, padding: char| {
            let _ = match (flag.unwrap_or(padding), width) {
                ('-', _) => write!(out, "{value}"),
                ('_' | ' ', width) => write!(out, "{value:width$}"),
                (_, width) => write!(out, "{value:0width$}"),
            };
        };
        let full =
            |names: &[&'static str], index: i64| names.get(index as usize).copied().unwrap_or_default();
        match directive {
            'a' => out.push_str(&full(&WEEKDAYS, weekday)[..3]),
            'A' => out.push_str(full(&WEEKDAYS, weekday)),
            'b' | 'h' => out.push_str(&full(&MONTHS, month - 1)[..3]),
            'B' => out.push_str(full(&MONTHS, month - 1)),
            'c' => out.push_str(&self.format("%a %b %e %H:%M:%S %Y")),
            'C' => number(out, year.div_euclid(100), 2, '0'),
            'd' => number(out, day, 2, '0'),
            'D' | 'x' => out.push_str(&self.format("%m/%d/%y")),
            'e' => number(out, day, 2, ' '),
            'f' => out.push_str("000000"),
            'F' => out.push_str(&self.format("%Y-%m-%d")),
            'H' => number(out, hour, 2, '0'),
            'I' => number(out, hour12, 2, '0'),
            'j' => number(out, year_day + 1, 3, '0'),
            'k' => number(out, hour, 2, ' '),
            'l' => number(out, hour12, 2, ' '),
            'm' => number(out, month, 2, '0'),
            'M' => number(out, minute, 2, '0'),
            'n' => out.push('\n'),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'P' => out.push_str(if hour < 12 { "am" } else { "pm" }),
            'r' => out.push_str(&self.format("%I:%M:%S %p")),
            'R' => out.push_str(&self.format("%H:%M")),
            's' => number(out, self.seconds, 0, '0'),
            'S' => number(out, second, 2, '0'),
            't' => out.push('\t'),
            'T' | 'X' => out.push_str(&self.format("%H:%M:%S")),
            'u' => number(out, (weekday + 6) % 7 + 1, 1, '0'),
            'U' => number(out, (year_day + 7 - weekday) / 7, 2, '0'),
            'w' => number(out, weekday, 1, '0'),
            'W' => number(out, (year_day + 7 - (weekday + 6) % 7) / 7, 2, '0'),
            'y' => number(out, year.rem_euclid(100), 2, '0'),
            'Y' => number(out, year, 1, '0'),
            // Without a time zone, like Python's naive datetime.
            'z' | 'Z' => {}
            '%' => out.push('%'),
            _ => {
                out.push('%');
                out.extend(flag);
                out.push(directive);
            }
        }
    }
}

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Year, month and day of a day counted from 1970-01-01 (Hinnant, chrono-Compatible Low-Level Date Algorithms).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468; // from 0000-03-01
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153; // from March
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Returns the inverse of [`civil`].
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_dates_are_inverse() {
        for days in (-1_000_000..1_000_000).step_by(97) {
            let (year, month, day) = civil(days);
            assert_eq!(days_before(year, month, day), days);
        }
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(19_782), (2024, 2, 29));
    }

    #[test]
    fn formats_as_python_does() {
        // 2024-07-06 13:05:09, a Saturday; expected texts by Python 3.11.
        let time = WallTime { seconds: 1_720_271_109 };
        let check = |format: &str, expected: &str| assert_eq!(time.format(format), expected, "{format}");
        check("%d %b %Y", "06 Jul 2024");
        check("%A, %B %-d, %Y at %I:%M:%S %p", "Saturday, July 6, 2024 at 01:05:09 PM");
        check("%Y-%m-%dT%H:%M:%S%z%%", "2024-07-06T13:05:09%");
        check("%j %U %W %u %w %y %e|%k|%l", "188 26 27 6 6 24  6|13| 1");
        check("%F %T %D %R %c %q %", "2024-07-06 13:05:09 07/06/24 13:05 Sat Jul  6 13:05:09 2024 %q %");
    }
}
