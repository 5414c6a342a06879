//! Emulation of cooperative matrices in plain WGSL, for tests on devices without them.
//!
//! The text of a kernel is changed only where it names matrices or subgroups. A subgroup becomes 32 consecutive threads
//! of the workgroup, which synchronize with the whole workgroup, so real subgroups may have any size.
//! `shaders/emulate.wgsl` defines the part of a matrix that each thread holds.

use std::fmt::Write;

/// Side of the matrices.
pub const SIDE: u32 = 16;
/// Threads of a subgroup.
pub const SUBGROUP: u32 = 32;
/// Bytes of workgroup memory that this needs: a quad for each thread of the largest workgroups that have matrices.
pub const SHARED_BYTES: u32 = 256 * 16;

/// Returns the kernel without cooperative matrices.
///
/// # Panics
/// If the source differs from the style of this crate.
pub fn emulate(source: &str) -> String {
    if !source.contains("enable wgpu_cooperative_matrix;") {
        return source.to_owned();
    }
    let source = source
        .replace("enable wgpu_cooperative_matrix;", "")
        .replace("coop_mat16x16<f16, A>", "array<vec4<f32>, 4>")
        .replace("coop_mat16x16<f16, B>", "Columns")
        .replace("coop_mat16x16<f32, C>", "array<vec4<f32>, 2>")
        .replace("coopMultiplyAdd(", "multiply_add(")
        .replace("subgroupBarrier()", "workgroupBarrier()")
        // The loops contain barriers, so all threads must enter them. Results do not change: tokens outside have weight
        // zero, and sums are multiplied with one.
        .replace("for (var sees = ", "for (var sees = true || ")
        .replace("subgroupAny(grows)", "true");
    let source = with_exchanges(&with_threads(&source));
    let (mut out, mut functions, mut columns) = (String::new(), Vec::new(), None);
    let mut rest = &source[..];
    while let Some(at) = ["coopLoad", "coopStore"].iter().filter_map(|name| rest.find(name)).min() {
        let (call, after) = Call::parse(&rest[at..]);
        out += &rest[..at];
        out += &call.text();
        if call.kind == "Outs" {
            assert_eq!(*columns.get_or_insert(call.array), call.array, "columns come from one array");
        }
        let function = call.function(&source);
        if !functions.contains(&function) {
            functions.push(function);
        }
        rest = after;
    }
    let common = include_str!("shaders/emulate.wgsl").replace("COLUMNS", columns.expect("columns"));
    [&out, rest, &common, &functions.concat()].concat()
}

/// Entry points count threads in the workgroup.
fn with_threads(source: &str) -> String {
    let lane = between(source, "@builtin(subgroup_invocation_id) ", ":").expect("a thread's place");
    let begin = format!(
        ") {{\n  begin(thread);\n  let group = thread / {SUBGROUP}u;\n  let {lane} = thread % {SUBGROUP}u;\n"
    );
    let (before, main) = source.split_once("fn main(").expect("an entry point");
    let main = main
        .replace(&format!("  @builtin(subgroup_invocation_id) {lane}: u32,\n"), "")
        .replace("@builtin(subgroup_id) group:", "@builtin(local_invocation_index) thread:")
        .replacen(") {\n", &begin, 1);
    format!("{before}fn main({main}")
}

/// Subgroup operations exchange one value or four.
fn with_exchanges(source: &str) -> String {
    let mut parts = source.split("subgroupShuffleXor(");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, _) = part.split_once(',').expect("what is exchanged");
        let is_quad = source.contains(&format!("var {name} = vec4<f32>("));
        let _ = write!(out, "{}({part}", if is_quad { "exchange_quad" } else { "exchange" });
    }
    out
}

/// A matrix from memory, or into it: `coopLoad<Rows>(&array[index], stride)`, `coopStoreT(matrix, &array[index], stride)`.
#[derive(Debug, PartialEq)]
struct Call<'a> {
    /// Alias of the matrix's type.
    kind: &'a str,
    /// The stored value; `None` for a load.
    stored: Option<&'a str>,
    array: &'a str,
    index: &'a str,
    stride: &'a str,
    /// True if the elements of a row are contiguous, false for columns.
    by_rows: bool,
}

impl<'a> Call<'a> {
    /// The call that a text begins with, and the text behind it.
    fn parse(text: &'a str) -> (Self, &'a str) {
        let open = text.find('(').expect("arguments");
        let close = open + closing(&text[open..]);
        let (name, arguments) = (&text[..open], &text[open + 1..close]);
        let (stored, place) = arguments.split_once('&').expect("a place in memory");
        let (array, index) = place.split_at(place.find('[').expect("an array"));
        let end = closing(index);
        let call = Self {
            kind: between(name, "<", ">").unwrap_or("Sums"),
            stored: stored.trim().strip_suffix(','),
            array,
            index: &index[1..end],
            stride: index[end + 1..].trim_start_matches(',').trim(),
            by_rows: name.split('<').next().is_some_and(|name| name.ends_with('T')),
        };
        (call, &text[close + 1..])
    }

    fn name(&self) -> String {
        let what = if self.stored.is_some() { "store" } else { "load" };
        let order = if self.by_rows { "rows" } else { "columns" };
        format!("{what}_{}_{order}_{}", self.kind, self.array)
    }

    fn text(&self) -> String {
        let stored = self.stored.map(|matrix| format!("{matrix}, ")).unwrap_or_default();
        format!("{}({stored}{}, {})", self.name(), self.index, self.stride)
    }

    /// Returns the function that replaces it in a kernel.
    fn function(&self, source: &str) -> String {
        let (kind, array, name) = (self.kind, self.array, self.name());
        if kind == "Outs" {
            let by_rows = self.by_rows;
            return format!(
                "\nfn {name}(at: u32, stride: u32) -> Outs {{\n  return Outs(at, stride, {by_rows});\n}}\n"
            );
        }
        let first = if kind == "Rows" { "0u" } else { "own_column()" };
        let quads = if kind == "Rows" { 4 } else { 2 };
        let of_quads = source.contains(&format!("{array}: array<vec4<"));
        // Parts of a matrix and their places: quads, or single numbers.
        let quad = |q: u32| {
            (
                format!("m[{q}]"),
                format!("{array}[at + own_row() * stride + {first} / 4u + {q}u]"),
                "vec4<f32>",
            )
        };
        let single = |k: u32| {
            let (row, column) = ("own_row()".to_owned(), format!("({first} + {k}u)"));
            let (line, i) = if self.by_rows { (row, column) } else { (column, row) };
            let place = match of_quads {
                true => format!("{array}[at + {line} * stride + {i} / 4u][{i} % 4u]"),
                false => format!("{array}[at + {line} * stride + {i}]"),
            };
            (format!("m[{}][{}]", k / 4, k % 4), place, "f32")
        };
        let parts: Vec<_> = match of_quads && self.by_rows {
            true => (0..quads).map(quad).collect(),
            false => (0..4 * quads).map(single).collect(),
        };
        let mut body = String::new();
        for (own, place, number) in parts {
            let _ = match self.stored {
                Some(_) => writeln!(body, "  {place} = {own};"),
                None => writeln!(body, "  {own} = {number}({place});"),
            };
        }
        match self.stored {
            Some(_) => format!("\nfn {name}(m: {kind}, at: u32, stride: u32) {{\n{body}}}\n"),
            None => format!(
                "\nfn {name}(at: u32, stride: u32) -> {kind} {{\n  var m: {kind};\n{body}  return m;\n}}\n"
            ),
        }
    }
}

/// Returns the text between two marks.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    Some(text.split_once(before)?.1.split_once(after)?.0)
}

/// Returns the position of the bracket that closes the first one of a text.
fn closing(text: &str) -> usize {
    let mut depth = 0;
    let place = text.char_indices().find(|(_, c)| {
        depth += i32::from("([".contains(*c)) - i32::from(")]".contains(*c));
        depth == 0
    });
    place.expect("a closing bracket").0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_understood() {
        let (call, rest) = Call::parse("coopLoadT<Rows>(\n  &x[f(1u, i[2])], (4u + UNITS) * 2u\n);\n");
        let expected = Call {
            kind: "Rows",
            stored: None,
            array: "x",
            index: "f(1u, i[2])",
            stride: "(4u + UNITS) * 2u",
            by_rows: true,
        };
        assert_eq!((call, rest), (expected, ";\n"));
        let (call, _) = Call::parse("coopStore(sums_0, &ends[group * 4u], SIDE)");
        assert_eq!(call.text(), "store_Sums_columns_ends(sums_0, group * 4u, SIDE)");
    }
}
