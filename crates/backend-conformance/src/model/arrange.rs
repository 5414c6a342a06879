//! Places of K and V.

use paguro_backend::{KvGroup, KvLayout, KvSlot};

use super::{ModelShape, PagesOf, Spans};

/// Assigns a group and a layer slot to each layer.
pub(super) fn arrange(shape: &ModelShape) -> (KvLayout, Vec<KvSlot>) {
    if let Some(PagesOf { kv, slots, .. }) = &shape.pages_of {
        let slot = |window: &Option<u32>| slots[usize::from(window.is_none())].expect("such a layer");
        return (kv.clone(), shape.windows.iter().map(slot).collect());
    }
    let attends = |layer: &usize| "alh".contains(shape.mixer(*layer)) && !shape.shares_kv(*layer);
    let windows: Vec<_> =
        (0..shape.windows.len()).filter(attends).map(|layer| shape.windows[layer]).collect();
    let count = |window| windows.iter().filter(|other| **other == window).count();
    let most = windows.iter().map(|&window| count(window)).max().unwrap_or(0);
    let layer_slots = shape.layer_slots.unwrap_or(most);
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut used: Vec<usize> = Vec::new();
    let mut places = Vec::new();
    for (layer, &window) in shape.windows.iter().enumerate() {
        if !attends(&layer) {
            let last = (0..layer).rfind(|other| attends(other) && shape.windows[*other] == window);
            // A layer that does not attend has a place that means nothing.
            places.push(last.map_or(KvSlot { group: 0, layer_slot: 0 }, |other| places[other]));
            continue;
        }
        let own = match shape.mixer(layer) {
            'l' => Some((1, shape.latent.key_dim())),
            _ => shape.window_heads.filter(|_| window.is_some()),
        };
        let (kv_heads, head_dim) = own.unwrap_or((shape.kv_heads, shape.head_dim));
        let fits =
            |group: &KvGroup| (group.window, group.kv_heads, group.head_dim) == (window, kv_heads, head_dim);
        let open = (0..groups.len()).find(|&group| fits(&groups[group]) && used[group] < layer_slots);
        let group = open.unwrap_or_else(|| {
            let spans = match shape.spans {
                Spans::None => false,
                Spans::Windows => window.is_some(),
                Spans::All => true,
            };
            groups.push(KvGroup { window, spans, layer_slots, kv_heads, head_dim });
            used.push(0);
            groups.len() - 1
        });
        places.push(KvSlot { group, layer_slot: used[group] });
        used[group] += 1;
    }
    if groups.is_empty() {
        // Pages of which nothing is read.
        groups.push(KvGroup { window: None, spans: false, layer_slots: 1, kv_heads: 2, head_dim: 256 });
    }
    (KvLayout { groups }, places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_fill_groups_of_equal_windows() {
        let arranged = |windows: &[Option<u32>], layer_slots| {
            let (kv, places) =
                arrange(&ModelShape { windows: windows.to_vec(), layer_slots, ..ModelShape::default() });
            let groups: Vec<_> = kv.groups.iter().map(|group| group.window.unwrap_or(0)).collect();
            let places: Vec<_> = places.iter().map(|place| (place.group, place.layer_slot)).collect();
            format!("{groups:?} {} {places:?}", kv.groups[0].layer_slots)
        };
        assert_eq!(arranged(&[None, None], None), "[0] 2 [(0, 0), (0, 1)]");
        assert_eq!(arranged(&[Some(5), None, Some(5)], None), "[5, 0] 2 [(0, 0), (1, 0), (0, 1)]");
        assert_eq!(arranged(&[Some(5), None, Some(5)], Some(1)), "[5, 0, 5] 1 [(0, 0), (1, 0), (2, 0)]");
    }
}
