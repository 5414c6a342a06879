//! `"%s" % x` and `"{}".format(x)`.

use minijinja::{
    Error, State, Value,
    formatting::{self, FormatStyle},
    value::ValueKind,
};

use super::values::{charge, fail, string};

/// Widths beyond what any template means: they would only take memory.
const MAX_WIDTH: usize = 10_000;

/// `format % arguments`
pub(super) fn format(state: &mut State, format: &str, arguments: &[Value]) -> Result<Value, Error> {
    let plain = format.replace("%%", "");
    let places = plain.matches('%').count() + plain.matches('*').count();
    // A dictionary or list may go unused: it could be there for names.
    let is_unused = match arguments {
        [argument] => {
            places == 0 && !matches!(argument.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Undefined)
        }
        _ => arguments.len() > places,
    };
    if is_unused {
        return fail("not all arguments converted during string formatting");
    }
    formatted(state, FormatStyle::Printf, format, arguments)
}

/// `format.format(*arguments)`, with keyword arguments last.
pub(super) fn str_format(state: &mut State, format: &str, arguments: &[Value]) -> Result<Value, Error> {
    formatted(state, FormatStyle::StrFormat, format, arguments)
}

fn formatted(
    state: &mut State,
    style: FormatStyle,
    format: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let too_wide =
        |digits: &str| digits.parse::<usize>().map_or(!digits.is_empty(), |width| width > MAX_WIDTH);
    if format.split(|c: char| !c.is_ascii_digit()).any(too_wide) {
        return fail("a width in a format string is too large");
    }
    // Widths may also be arguments: `%*d`, `{:{}}`.
    let takes_width = match style {
        FormatStyle::Printf => format.contains('*'),
        FormatStyle::StrFormat => {
            format.contains(":{") || format.matches('{').count() > format.matches('}').count()
        }
    };
    if takes_width
        && arguments.iter().any(|argument| argument.as_usize().is_some_and(|width| width > MAX_WIDTH))
    {
        return fail("a width for a format string is too large");
    }
    // An argument is written once for each place that names it.
    let places = format.matches(['%', '{']).count();
    let longest = arguments.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
    charge(state, places.saturating_mul(longest))?;
    let text = formatting::format(style, format, arguments)?;
    string(state, text)
}
