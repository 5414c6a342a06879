//! Formats of activations: those that the matmuls that read them need.

use super::{
    List,
    facts::Facts,
    kernels,
    node::{Formats, Kernel, Node, RowClass},
};

/// Enters the formats of all activations that nodes write.
pub fn formats(facts: &Facts<'_>, list: &mut List) {
    let nodes: Vec<Node> = list.body.iter().chain(&list.head).cloned().collect();
    // The last matmul of the body may write the activations of the head.
    for (index, node) in list.body.iter_mut().chain(&mut list.head).enumerate() {
        node.emits = of(facts, list.class, &nodes, index);
    }
}

/// Returns the formats that the readers of a node's activations need. Attention and its merge write the same activations, so
/// that writers before the first reader do not end the search.
fn of(facts: &Facts<'_>, class: RowClass, nodes: &[Node], index: usize) -> Formats {
    let mut formats = Formats::default();
    let Some(acts) = nodes[index].writes_acts() else { return formats };
    let (mut is_read, mut are_cooperative) = (false, true);
    for node in &nodes[index + 1..] {
        if let Some((_, linear)) = node.reads_acts().filter(|(read, _)| *read == acts) {
            is_read = true;
            // Rows that are made of several ones may be fewer than those of the class.
            are_cooperative &= node.merged == 1
                && matches!(&node.kernel, Kernel::Matmul(op) if kernels::is_cooperative(facts, class, op));
            let is_quantized = linear.is_some_and(|linear| facts.is_quantized(linear));
            formats.q8 |= is_quantized;
            formats.f32 |= linear.is_some() && !is_quantized || matches!(node.kernel, Kernel::Unpack { .. });
        }
        if is_read && node.writes_acts() == Some(acts) {
            break;
        }
    }
    formats.halves_only = is_read && are_cooperative;
    formats
}
