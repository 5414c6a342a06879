//! Slots for experts: copies of those that have no slot. The pass comes after fusion, which matches matmuls that follow each
//! other.

use super::{
    List,
    node::{ExpertMatmul, FillExperts, Kernel, Node},
};

/// Adds the copies of the experts of each matmul. Those of a layer's first matmul precede it, and those of each other one run
/// beside the matmul before it.
pub fn pool(list: &mut List) {
    let nodes = std::mem::take(&mut list.body);
    let fills: Vec<(usize, Node)> = nodes.iter().filter_map(fill).collect();
    let mut rest = fills.into_iter().peekable();
    for node in nodes {
        let own = fill(&node).map(|(stack, _)| stack);
        if own == Some(0) {
            list.body.extend(rest.next().map(|(_, fill)| fill));
        }
        list.body.push(node);
        if own.is_some() {
            list.body.extend(rest.next_if(|(stack, _)| *stack > 0).map(|(_, fill)| fill));
        }
    }
}

/// Returns the number of a matmul of experts with slots in its layer, and its copies.
fn fill(node: &Node) -> Option<(usize, Node)> {
    let Kernel::ExpertMatmul(ExpertMatmul { pool, stack, linears, order, .. }) = &node.kernel else {
        return None;
    };
    let fill = FillExperts { pool: (*pool)?, stack: *stack, linears: linears.clone(), order: *order };
    Some((*stack, Node::new(Kernel::FillExperts(fill))))
}
