//! Assignment of layers to the pages of K/V groups.
//!
//! Layers that read the K and V of an earlier layer share its layer slot. All pages have one size, so a group of smaller
//! heads has more layer slots. A model without attention has small pages, which only hold copies of states.

use paguro_backend::{KvGroup, KvLayout, KvSlot};

/// Maximum memory of a layout with fewer groups, relative to the minimum.
const TOLERANCE: f64 = 1.05;

/// Layers that can share pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvKind {
    /// Window of these layers; `None` for full attention.
    pub(super) window: Option<u32>,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

impl KvKind {
    fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Arranges layers into groups, layer by layer in `layers`.
///
/// Pages have the same size in bytes in all groups, so the number of slots of a group follows from the page's size and
/// the width of its K and V; slots may stay unused. Small pages waste nothing but make many groups, each with its own
/// block table; large pages make few groups, but a group of full layers that leaves some slots unused wastes them over
/// the whole context. So: of the sizes that need at most 5 % more memory than the best does, for a sequence
/// that fills `context`, the one with the fewest groups. Gemma 2 (one full layer to one local) gets two groups;
/// Gemma 3 (one to five) gets one group for the full layers, and as many as needed, of that size, for the others.
pub(super) fn arrange(layers: &[KvKind], context: usize) -> (KvLayout, Vec<KvSlot>) {
    let mut kinds: Vec<(KvKind, usize)> = Vec::new(); // with the number of its layers
    for &layer in layers {
        match kinds.iter_mut().find(|kind| kind.0 == layer) {
            Some(kind) => kind.1 += 1,
            None => kinds.push((layer, 1)),
        }
    }
    let page = choose_page(&kinds, context);

    let mut groups = Vec::new();
    let mut first_group = Vec::new(); // of each kind
    for &(kind, layers) in &kinds {
        first_group.push(groups.len());
        let KvKind { window, kv_heads, head_dim } = kind;
        let layer_slots = layer_slots(page, &kind);
        let group = KvGroup { window, spans: false, layer_slots, kv_heads, head_dim };
        groups.extend((0..layers.div_ceil(layer_slots)).map(|_| group));
    }
    let mut seen = vec![0; kinds.len()];
    let place = |layer: &KvKind| {
        let kind = kinds.iter().position(|kind| kind.0 == *layer).unwrap_or(0); // every layer made a kind
        let nth = seen[kind];
        seen[kind] += 1;
        let layer_slots = layer_slots(page, layer);
        KvSlot { group: first_group[kind] + nth / layer_slots, layer_slot: nth % layer_slots }
    };
    let places = layers.iter().map(place).collect();
    (KvLayout { groups }, places)
}

/// Returns the layout of a model without attention: a group with a slot that no layer uses. Copies of states are stored
/// in pages, so these should not be much smaller than a state of `state_bytes`, and yet small for each token.
pub(super) fn without_attention(state_bytes: usize) -> KvLayout {
    const PARTS: usize = 256;
    const HEAD: usize = 64;
    // K and V of 32 tokens in two bytes each.
    let kv_heads = (state_bytes / PARTS / (2 * 32 * 2 * HEAD)).clamp(1, 8);
    KvLayout {
        groups: vec![KvGroup { window: None, spans: false, layer_slots: 1, kv_heads, head_dim: HEAD }],
    }
}

/// Returns the number of layers of a kind that fit in a page with `page` elements of K for each token.
fn layer_slots(page: usize, kind: &KvKind) -> usize {
    (page / kind.width().max(1)).max(1)
}

/// Returns the number of elements of K of a token in a page.
fn choose_page(kinds: &[(KvKind, usize)], context: usize) -> usize {
    let widest = kinds.iter().map(|(kind, _)| kind.width()).max().unwrap_or(1);
    let pages = kinds
        .iter()
        .flat_map(|(kind, layers)| (1..=*layers).map(|slots| slots.saturating_mul(kind.width())))
        .filter(|&page| page >= widest);
    let groups = |page: usize| -> usize {
        kinds.iter().map(|(kind, layers)| layers.div_ceil(layer_slots(page, kind))).sum()
    };
    let memory = |page: usize| -> f64 {
        let kept = |window: Option<u32>| window.map_or(context, |window| context.min(window as usize)) as f64;
        let of_kind = |(kind, layers): &(KvKind, usize)| {
            layers.div_ceil(layer_slots(page, kind)) as f64 * page as f64 * kept(kind.window)
        };
        kinds.iter().map(of_kind).sum()
    };
    let least = pages.clone().map(memory).fold(f64::INFINITY, f64::min);
    let good_enough = pages.filter(|&page| memory(page) <= least * TOLERANCE);
    good_enough.min_by_key(|&page| (groups(page), page)).unwrap_or(widest)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// Arranges layers, and checks that each has a separate slot in a group of its kind.
    fn check_places(layers: &[KvKind], context: usize) -> KvLayout {
        let (layout, places) = arrange(layers, context);
        let mut used = std::collections::HashSet::new();
        for (place, layer) in places.iter().zip(layers) {
            assert!(used.insert((place.group, place.layer_slot)), "two layers at {place:?}");
            let KvGroup { window, spans: _, layer_slots, kv_heads, head_dim } = layout.groups[place.group];
            assert!(place.layer_slot < layer_slots);
            assert_eq!(KvKind { window, kv_heads, head_dim }, *layer);
        }
        layout
    }

    /// `local` and `full`: K/V heads and their size, in patterns as below.
    #[track_caller]
    fn check_shapes(
        pattern: &str,
        context: usize,
        local: (usize, usize),
        full: (usize, usize),
        expected: Expect,
    ) {
        let kind = |c| {
            let (kv_heads, head_dim) = if c == 'l' { local } else { full };
            KvKind { window: (c == 'l').then_some(1024), kv_heads, head_dim }
        };
        let layers: Vec<_> = pattern.chars().map(kind).collect();
        let layout = check_places(&layers, context);
        let kept = |window: Option<u32>| window.map_or(context, |window| window as usize);
        let page = layout.groups.iter().map(|group| group.layer_slots * group.width()).max().unwrap();
        let allocated: usize = layout.groups.iter().map(|group| page * kept(group.window)).sum();
        let used: usize = layers.iter().map(|layer| layer.width() * kept(layer.window)).sum();
        let mut groups: Vec<String> = Vec::new();
        for group in &layout.groups {
            let kind = if group.window.is_some() { "local" } else { "full" };
            groups.push(format!("{kind} with {} slots", group.layer_slots));
        }
        groups.dedup();
        let unused = 100 * (allocated - used) / allocated;
        expected.assert_eq(&format!(
            "{} groups, {}, {unused} % unused",
            layout.groups.len(),
            groups.join(", ")
        ));
    }

    /// Gemma 4: E2B and E4B without the layers that share K and V, 26B, 31B; and heads whose sizes have no small common
    /// multiple.
    #[test]
    fn pages_have_one_size_for_all_shapes() {
        let layers = |count: usize, period: usize| -> String {
            (1..=count).map(|layer| if layer % period == 0 { 'f' } else { 'l' }).collect()
        };
        for context in [8192, 131_072] {
            let check = |count, period, local, full, expected: [Expect; 2]| {
                let [short, long] = expected;
                let expected = if context == 8192 { short } else { long };
                check_shapes(&layers(count, period), context, local, full, expected);
            };
            check(
                15,
                5,
                (1, 256),
                (1, 512),
                [
                    expect!["3 groups, local with 6 slots, full with 3 slots, 0 % unused"],
                    expect!["3 groups, local with 6 slots, full with 3 slots, 0 % unused"],
                ],
            );
            check(
                24,
                6,
                (2, 256),
                (2, 512),
                [
                    expect!["4 groups, local with 8 slots, full with 4 slots, 4 % unused"],
                    expect!["4 groups, local with 8 slots, full with 4 slots, 0 % unused"],
                ],
            );
            check(
                30,
                6,
                (8, 256),
                (2, 512),
                [
                    expect!["10 groups, local with 3 slots, full with 6 slots, 11 % unused"],
                    expect!["14 groups, local with 2 slots, full with 5 slots, 2 % unused"],
                ],
            );
            check(
                60,
                6,
                (16, 256),
                (4, 512),
                [
                    expect!["11 groups, local with 5 slots, full with 10 slots, 0 % unused"],
                    expect!["11 groups, local with 5 slots, full with 10 slots, 0 % unused"],
                ],
            );
            check(
                12,
                3,
                (3, 80),
                (2, 112),
                [
                    expect!["3 groups, local with 4 slots, full with 4 slots, 5 % unused"],
                    expect!["4 groups, local with 3 slots, full with 4 slots, 0 % unused"],
                ],
            );
        }
    }

    /// `pattern`: one letter a layer, `f` for full and `l` for local with the given window.
    #[track_caller]
    fn check(pattern: &str, window: u32, context: usize, expected: Expect) {
        let kind = |c| KvKind { window: (c == 'l').then_some(window), kv_heads: 1, head_dim: 64 };
        let layout = check_places(&pattern.chars().map(kind).collect::<Vec<_>>(), context);
        let full = layout.groups.iter().filter(|group| group.window.is_none()).count();
        let slots = layout.groups[0].layer_slots;
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
