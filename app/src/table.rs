//! Tables on standard output, in the width of the terminal.

use crate::{
    failure::Outcome,
    output::Output,
    settings::Terminal,
    units::{pad, wrapped},
};

/// Fewest columns of a text beside the cells.
const MIN_BESIDE: usize = 28;

/// Blanks before a text below the cells.
const INDENT: usize = 2;

/// Rows of `N` cells, each with an optional text of any length after them. The first cell is the name.
pub struct Table<const N: usize> {
    /// Titles of the cells.
    pub titles: [&'static str; N],
    /// Title of the texts.
    pub text: &'static str,
    /// Cells of numbers, which end below each other.
    pub numbers: &'static [usize],
    /// Cells that are left out on narrow terminals, in this order.
    pub spare: &'static [usize],
    rows: Vec<([String; N], String)>,
}

impl<const N: usize> Table<N> {
    /// Creates an empty table.
    pub fn new(titles: [&'static str; N], numbers: &'static [usize], spare: &'static [usize]) -> Self {
        Self { titles, text: "", numbers, spare, rows: Vec::new() }
    }

    /// Adds a row.
    pub fn push(&mut self, cells: [String; N], text: impl Into<String>) {
        self.rows.push((cells, text.into()));
    }

    /// Writes the table, with bold titles.
    ///
    /// # Errors
    /// The error of standard output.
    pub fn write(&self, out: &mut Output, terminal: Terminal) -> Outcome<()> {
        let columns = terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| width.0.into());
        let mut lines = self.lines(columns).into_iter();
        if let Some(titles) = lines.next() {
            titles.iter().try_for_each(|line| out.line(terminal.bold(line)))?;
        }
        lines.flatten().try_for_each(|line| out.line(line))
    }

    /// Returns the lines of the titles and of each row. A name that is too long for its cell has a line of its own.
    fn lines(&self, columns: Option<usize>) -> Vec<Vec<String>> {
        let titles = (self.titles.map(str::to_owned), self.text.to_owned());
        let rows = || std::iter::once(&titles).chain(&self.rows);
        let widths: [usize; N] =
            std::array::from_fn(|i| rows().map(|(cells, _)| cells[i].chars().count()).max().unwrap_or(0));
        let mut shown = [true; N];
        let rest = |shown: &[bool; N]| {
            (1..N).filter(|cell| shown[*cell]).map(|cell| widths[cell] + 2).sum::<usize>()
        };
        if let Some(columns) = columns {
            let name = widths[0].min(columns / 2);
            for &cell in self.spare {
                if name + rest(&shown) > columns {
                    shown[cell] = false;
                }
            }
        }
        let rest = rest(&shown);
        let room = columns.map_or(usize::MAX, |columns| columns.saturating_sub(rest));
        let names = rows().map(|(cells, _)| cells[0].chars().count());
        let name = names.filter(|width| *width <= room).max().unwrap_or(0);
        let line = |(cells, text): &([String; N], String)| {
            let mut line = pad(&cells[0], name);
            let mut lines = Vec::new();
            if cells[0].chars().count() > name {
                lines.push(std::mem::replace(&mut line, pad("", name)));
            }
            for cell in (1..N).filter(|cell| shown[*cell]) {
                line += "  ";
                let width = widths[cell];
                line += &match self.numbers.contains(&cell) {
                    true => format!("{:>width$}", cells[cell]),
                    false => pad(&cells[cell], width),
                };
            }
            let used = name + rest + 2;
            match columns {
                _ if text.is_empty() => {}
                Some(columns) if used + text.chars().count() > columns => {
                    let beside = columns.saturating_sub(used);
                    let (indent, width) = match beside >= MIN_BESIDE {
                        true => (used, beside),
                        false => (INDENT, columns.saturating_sub(INDENT)),
                    };
                    let mut texts = wrapped(text, width).into_iter();
                    if indent == used {
                        line += "  ";
                        line += &texts.next().unwrap_or_default();
                    }
                    lines.push(std::mem::take(&mut line));
                    lines.extend(texts.map(|text| format!("{:indent$}{text}", "")));
                }
                _ => {
                    line += "  ";
                    line += text;
                }
            }
            if !line.is_empty() {
                lines.push(line);
            }
            lines.iter_mut().for_each(|line| line.truncate(line.trim_end().len()));
            // A long name whose other cells are empty.
            lines.retain(|line| !line.is_empty());
            lines
        };
        rows().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_the_terminal() {
        let mut table = Table::new(["name", "size", "changed"], &[1], &[2]);
        table.text = "state";
        table.push(["qwen3:4b", "2.5 GB", "just now"].map(str::to_owned), "");
        table.push(
            ["a/rather-long-name:Q8_0", "91 MB", "3 days ago"].map(str::to_owned),
            "cannot run: it is old",
        );
        let expected = [
            // No terminal: everything is on the line.
            (
                None,
                "name                       size  changed     state\n\
                 qwen3:4b                 2.5 GB  just now\n\
                 a/rather-long-name:Q8_0   91 MB  3 days ago  cannot run: it is old",
            ),
            // The text is below, if there is no place beside the cells.
            (
                Some(60),
                "name                       size  changed     state\n\
                 qwen3:4b                 2.5 GB  just now\n\
                 a/rather-long-name:Q8_0   91 MB  3 days ago\n  cannot run: it is old",
            ),
            // A cell is left out, and a long name has its own line.
            (
                Some(24),
                "name        size  state\n\
                 qwen3:4b  2.5 GB\n\
                 a/rather-long-name:Q8_0\n           91 MB\n  cannot run: it is old",
            ),
        ];
        for (columns, text) in expected {
            let lines = table.lines(columns).concat();
            assert_eq!(lines.join("\n"), text, "{columns:?}");
            let widest = lines.iter().map(|line| line.chars().count()).max().unwrap();
            assert!(columns.is_none_or(|columns| widest <= columns));
        }
        let mut wide = Table::new(["name", "size"], &[1], &[]);
        wide.push(["m".into(), "1 B".into()], "a text that needs more than one line beside its cells");
        assert_eq!(
            wide.lines(Some(44)).concat(),
            [
                "name  size",
                "m      1 B  a text that needs more than one",
                "            line beside its cells"
            ]
        );
    }
}
