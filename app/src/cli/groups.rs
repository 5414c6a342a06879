//! Help with the commands in groups, which clap does not have.

use clap::Command;

use crate::units;

/// Groups of commands.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Run", &["run", "embed", "rerank", "sessions"]),
    (
        "Models",
        &["pull", "search", "import", "list", "show", "rm", "cp", "preset", "verify", "prune", "rebuild"],
    ),
    ("Server", &["serve", "ps", "unload", "keys", "cache"]),
    (
        "Tools",
        &[
            "bench",
            "eval",
            "inspect",
            "tokenize",
            "quantize",
            "imatrix",
            "convert",
            "devices",
            "completions",
            "man",
            "version",
            "help",
        ],
    ),
];

/// Maximum width of the help.
const MOST_COLUMNS: usize = 110;

/// Width of the help where there is no terminal, as clap has it.
const USUAL_COLUMNS: usize = 100;

/// Returns the command line with the list of commands in groups.
pub fn grouped(mut command: Command) -> Command {
    // Adds `help`.
    command.build();
    let columns = terminal_size::terminal_size().map_or(USUAL_COLUMNS, |(width, _)| width.0 as usize);
    let list = list(&command, columns.clamp(40, MOST_COLUMNS));
    command.help_template(format!(
        "{{before-help}}{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{list}\nOptions:\n{{options}}{{after-help}}\n"
    ))
}

/// Returns the groups, each command with its description in at most `columns` columns.
fn list(command: &Command, columns: usize) -> String {
    let commands: Vec<&Command> =
        command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    let width = commands.iter().map(|command| command.get_name().len()).max().unwrap_or(0);
    let mut text = String::new();
    for (title, names) in GROUPS {
        text += &format!("\n{title}:\n");
        for name in names {
            let Some(command) = commands.iter().find(|command| command.get_name() == *name) else { continue };
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let aliases: Vec<_> = command.get_visible_aliases().collect();
            let aliases = match aliases.is_empty() {
                true => String::new(),
                false => format!(" [alias: {}]", aliases.join(", ")),
            };
            let lines =
                units::wrapped(&format!("{about}{aliases}"), columns.saturating_sub(width + 4).max(20));
            for (index, line) in lines.iter().enumerate() {
                let name = if index == 0 { *name } else { "" };
                text += &format!("  {name:width$}  {line}\n");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn every_command_is_in_one_group() {
        let mut cli = Cli::command();
        cli.build();
        let shown: BTreeSet<_> =
            cli.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name).collect();
        let grouped: Vec<_> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        assert_eq!(grouped.iter().copied().collect::<BTreeSet<_>>(), shown);
        assert_eq!(grouped.len(), shown.len(), "a command is in two groups");
        for columns in [40, 80, 110] {
            let list = list(&cli, columns);
            assert!(list.lines().all(|line| line.chars().count() <= columns), "{list}");
            assert!(list.contains("\nServer:\n  serve "), "{list}");
        }
    }
}
