//! Which page holds which layer's K and V.

use paguro_backend::{KvGroup, KvLayout, KvSlot};

/// How much more memory than possible a layout may take for having fewer groups.
const TOLERANCE: f64 = 1.05;

/// Arranges layers into groups of equally many slots, layer by layer in `windows` (`None` sees all).
///
/// Pages have the same size in all groups, so layers of different windows can share an arena only if their groups
/// have equally many slots, and slots may stay unused. Few slots waste nothing but make many groups, each with its own
/// block table; many slots make few groups, but a group of full layers that leaves some unused wastes them over the
/// whole context. So: of the numbers of slots that need at most 5 % more memory than the best does, for a sequence
/// that fills `context`, the one with the fewest groups. Gemma 2 (one full layer to one local) gets two groups;
/// Gemma 3 (one to five) gets one group for the full layers, and as many as needed, of that size, for the others.
pub(super) fn arrange(
    windows: &[Option<u32>],
    kv_heads: usize,
    head_dim: usize,
    context: usize,
) -> (KvLayout, Vec<KvSlot>) {
    let mut kinds: Vec<(Option<u32>, usize)> = Vec::new(); // with the number of its layers
    for &window in windows {
        match kinds.iter_mut().find(|kind| kind.0 == window) {
            Some(kind) => kind.1 += 1,
            None => kinds.push((window, 1)),
        }
    }
    let slots = choose_slots(&kinds, context);

    let mut groups = Vec::new();
    let mut first_group = Vec::new(); // of each kind
    for &(window, layers) in &kinds {
        first_group.push(groups.len());
        let group = KvGroup { window, slots, kv_heads, head_dim };
        groups.extend((0..layers.div_ceil(slots)).map(|_| group));
    }
    let mut seen = vec![0; kinds.len()];
    let place = |window: &Option<u32>| {
        let kind = kinds.iter().position(|kind| kind.0 == *window).unwrap_or(0); // every window made a kind
        let nth = seen[kind];
        seen[kind] += 1;
        KvSlot { group: first_group[kind] + nth / slots, slot: nth % slots }
    };
    let places = windows.iter().map(place).collect();
    (KvLayout { groups }, places)
}

fn choose_slots(kinds: &[(Option<u32>, usize)], context: usize) -> usize {
    let most = kinds.iter().map(|kind| kind.1).max().unwrap_or(1);
    let memory = |slots: usize| -> f64 {
        let kept = |window: Option<u32>| window.map_or(context, |window| context.min(window as usize)) as f64;
        kinds.iter().map(|&(window, layers)| (layers.div_ceil(slots) * slots) as f64 * kept(window)).sum()
    };
    let groups = |slots: usize| kinds.iter().map(|kind| kind.1.div_ceil(slots)).sum::<usize>();
    let least = (1..=most).map(memory).fold(f64::INFINITY, f64::min);
    let good_enough = (1..=most).filter(|&slots| memory(slots) <= least * TOLERANCE);
    good_enough.min_by_key(|&slots| (groups(slots), slots)).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// `pattern`: one letter a layer, `f` for full and `l` for local with the given window.
    #[track_caller]
    fn check(pattern: &str, window: u32, context: usize, expected: Expect) {
        let windows: Vec<_> = pattern.chars().map(|c| (c == 'l').then_some(window)).collect();
        let (layout, places) = arrange(&windows, 1, 64, context);
        let mut used = std::collections::HashSet::new();
        for (place, window) in places.iter().zip(&windows) {
            assert!(used.insert((place.group, place.slot)), "two layers at {place:?}");
            assert!(place.slot < layout.groups[place.group].slots);
            assert_eq!(layout.groups[place.group].window, *window);
        }
        let full = layout.groups.iter().filter(|group| group.window.is_none()).count();
        let slots = layout.groups[0].slots;
        let wasted = layout.groups.len() * slots - pattern.len();
        let local = layout.groups.len() - full;
        expected.assert_eq(&format!("{full} full, {local} local, {slots} slots, {wasted} wasted"));
    }

    #[test]
    fn groups_of_known_models() {
        let gemma3 =
            |layers: usize| -> String { (0..layers).map(|i| if i % 6 == 5 { 'f' } else { 'l' }).collect() };
        check(&"f".repeat(32), 0, 8192, expect!["1 full, 0 local, 32 slots, 0 wasted"]);
        check(&"l".repeat(32), 4096, 32768, expect!["0 full, 1 local, 32 slots, 0 wasted"]);
        check(&"lf".repeat(13), 4096, 8192, expect!["1 full, 1 local, 13 slots, 0 wasted"]);
        check(&gemma3(18), 512, 32768, expect!["1 full, 5 local, 3 slots, 0 wasted"]);
        check(&gemma3(26), 512, 32768, expect!["1 full, 6 local, 4 slots, 2 wasted"]);
        check(&gemma3(34), 1024, 131072, expect!["1 full, 6 local, 5 slots, 1 wasted"]);
        check(&gemma3(48), 1024, 131072, expect!["1 full, 5 local, 8 slots, 0 wasted"]);
        check(&gemma3(62), 1024, 131072, expect!["1 full, 6 local, 10 slots, 8 wasted"]);
        check(&gemma3(26), 512, 1024, expect!["2 full, 11 local, 2 slots, 0 wasted"]);
        check(&format!("l{}", "f".repeat(31)), 4096, 32768, expect!["8 full, 1 local, 4 slots, 4 wasted"]);
        check("lf", 16, 64, expect!["1 full, 1 local, 1 slots, 0 wasted"]);
    }
}
