//! The machine's processor and free memory, as far as the system reports them.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the processor's name, or its architecture if the system does not report it.
pub fn processor_name() -> String {
    let linux = || {
        let text = fs::read_to_string("/proc/cpuinfo").ok()?;
        field(&text, "model name").map(str::to_owned)
    };
    // Arm boards have a name for the board instead of the processor.
    let board =
        || Some(fs::read_to_string("/proc/device-tree/model").ok()?.trim_end_matches('\0').to_owned());
    let name = linux().or_else(board).or_else(|| sysctl("machdep.cpu.brand_string"));
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the bytes that this process can allocate without swapping.
///
/// Linux reports the available memory of the machine and the limit of a container. macOS reports only the total memory,
/// which is then the result: it compresses and swaps other memory. Elsewhere it is half of the address space, and an
/// allocation that is too large fails.
pub fn memory_available() -> u64 {
    let machine = || {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let kilobytes: u64 = field(&text, "MemAvailable")?.split_whitespace().next()?.parse().ok()?;
        Some(kilobytes * 1024)
    };
    let installed = || sysctl("hw.memsize")?.parse().ok();
    let machine = machine().or_else(installed).unwrap_or(isize::MAX as u64);
    container_memory().map_or(machine, |container| machine.min(container))
}

/// Returns the value behind `key :` in a file of such lines.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim())
    })
}

/// Returns macOS' value for a name.
fn sysctl(name: &str) -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the remaining memory of this process' control groups (version 2): that of the tightest one.
fn container_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let groups = Path::new(group).ancestors().map(|group| root.join(group));
    let read = |group: &PathBuf, file: &str| fs::read_to_string(group.join(file)).unwrap_or_default();
    let left = |group: PathBuf| {
        group_memory(
            &read(&group, "memory.max"),
            &read(&group, "memory.current"),
            &read(&group, "memory.stat"),
        )
    };
    groups.filter_map(left).min()
}

/// Returns the limit minus the used memory; inactive file caches do not count as used.
fn group_memory(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?; // or "max"
    let current: u64 = current.trim().parse().ok()?;
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let files: u64 = files.and_then(|files| files.trim().parse().ok()).unwrap_or(0);
    Some(max.saturating_sub(current.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "processor\t: 0\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9B45: special\n\nprocessor : 1\n";
        assert_eq!(field(text, "model name"), Some("AMD EPYC 9B45: special"));
        assert_eq!(field(text, "model"), Some("2"));
        assert_eq!(field(text, "Hardware"), None);
        assert_eq!(field("MemFree:  12 kB\nMemAvailable:   345 kB\n", "MemAvailable"), Some("345 kB"));
    }

    #[test]
    fn a_control_group_bounds_memory() {
        let stat = "anon 400\nfile 300\nactive_file 100\ninactive_file 200\n";
        assert_eq!(group_memory("1000\n", "700\n", stat), Some(500));
        assert_eq!(group_memory("1000\n", "1500\n", ""), Some(0));
        assert_eq!(group_memory("max\n", "700\n", stat), None);
        assert_eq!(group_memory("", "", ""), None);
    }

    #[test]
    fn this_machine_has_a_name_and_memory() {
        assert!(!processor_name().is_empty());
        assert!(memory_available() > 1 << 20);
    }
}
