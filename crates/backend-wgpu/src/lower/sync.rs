//! Synchronization: barriers everywhere, or handoff without barriers where the device has it.
//!
//! Partials of attention pass to the merge by handoff. In steps of one row of programs whose layers all have the same five
//! launches, everything else does as well: a layer has one barrier, before attention. In other steps, low-rank products of adapters
//! do.

use super::{
    List,
    facts::Facts,
    node::{Attend, Epilogue, Input, Kernel, Link, Matmul, Merge, Node, Sync},
};
use crate::{
    heads::is_plain,
    layout::{BLOCK, Layout},
    plan::Tile,
};

/// Matmuls of queries, keys and values of a layer, at most.
pub const MOST_QUERIES: usize = 3;

/// Enters the synchronization of all nodes.
pub fn sync(facts: &Facts<'_>, list: &mut List) {
    for node in &mut list.body {
        if let Kernel::Merge(Merge { kv, .. }) | Kernel::Attend(Attend { kv, .. }) = node.kernel
            && facts.hands_partials(list.class, kv.group)
        {
            node.sync = Sync::Partials;
        }
    }
    match words(facts, list) {
        Some(links) => hand_words(facts, list, &links),
        None => hand_low(facts, list),
    }
}

/// Enters the handoff of low-rank products where all else passes barriers, so that a matmul runs beside its products with A. Each
/// launch of these clears the buffer of the next one behind a barrier, which the readers of that buffer have passed. So either all
/// kernels of a step are without cooperative matrices, or those of none of these nodes.
fn hand_low(facts: &Facts<'_>, list: &mut List) {
    // Steps with states cannot be repeated without handoff.
    if !facts.target.handoff || facts.target.timed || !facts.program.state.is_empty() {
        return;
    }
    let (mut count, mut nodes) = (0, list.body.iter_mut().peekable());
    while let Some(node) = nodes.next() {
        let Kernel::Shrink(op) = &node.kernel else { continue };
        let has_wide = facts.layout(op.linears[0].matrix) != Layout::F32 && !op.in_order;
        let stores = matches!(op.epilogue, Epilogue::Store { .. } | Epilogue::Add(_));
        if op.input == Input::Ready && stores && (has_wide || facts.target.cooperative.is_none()) {
            node.sync = Sync::Low(count % 2);
            if let Some(matmul) = nodes.peek_mut() {
                matmul.sync = node.sync;
            }
            count += 1;
        }
    }
}

/// Enters the handoff of words. Activations with handoff have eight bits, so a head of floats gets a norm of its own.
fn hand_words(facts: &Facts<'_>, list: &mut List, links: &[Option<(usize, Link)>]) {
    for (node, link) in list.body.iter_mut().zip(links) {
        if let Some((layer, link)) = *link {
            node.sync = Sync::Words(layer, link);
        }
    }
    // Products with A of values in another format run beside those of queries and keys, and not behind their matmul.
    for index in 1..list.body.len() {
        let is_of_queries = |node: &Node| matches!(node.sync, Sync::Words(_, Link::Queries(_)));
        let is_shrink = |node: &Node| matches!(node.kernel, Kernel::Shrink(_));
        let (before, rest) = list.body.split_at(index);
        if is_shrink(&rest[0]) && is_of_queries(&rest[0]) {
            let is_matmul = |node: &&Node| is_of_queries(node) && !is_shrink(node);
            let matmuls = before.iter().rev().take_while(is_matmul).count();
            list.body[index - matmuls..=index].rotate_right(1);
        }
    }
    let layers = links.iter().flatten().last().map_or(0, |(layer, _)| layer + 1);
    let is_quantized =
        |node: &Node| matches!(&node.kernel, Kernel::Matmul(op) if facts.is_quantized(&op.linears[0]));
    list.direct = list.direct.take().filter(is_quantized);
    match (&mut list.direct, list.body.last_mut()) {
        (Some(direct), _) => direct.sync = Sync::Words(layers, Link::Head),
        (None, Some(Node { kernel: Kernel::Matmul(op), .. })) => op.epilogue = Epilogue::Add(1.0),
        (None, _) => {}
    }
}

/// Returns the place of each node of the body in its layer, if all layers have the launches of handoff.
fn words(facts: &Facts<'_>, list: &List) -> Option<Vec<Option<(usize, Link)>>> {
    // A program that ends with rows has no head.
    let is_normed = list.head.first().is_none_or(|node| match &node.kernel {
        Kernel::Norm(op) => op.norm.as_ref().is_some_and(is_plain),
        _ => false,
    });
    if !list.class.is_one() || facts.target.timed || !is_normed {
        return None;
    }
    let mut links = Vec::new();
    let mut nodes = list.body.iter().peekable();
    while nodes.next_if(|node| matches!(node.kernel, Kernel::Embed { .. } | Kernel::SetGiven)).is_some() {
        links.push(None);
    }
    nodes.next_if(|node| matches!(node.kernel, Kernel::Norm(_)))?;
    links.push(None);
    let mut widths = None;
    for layer in 0.. {
        let of = |node: &Node, holds: fn(&Matmul) -> bool| match &node.kernel {
            Kernel::Matmul(op) => holds(op) && facts.is_quantized(&op.linears[0]),
            _ => false,
        };
        let rotates = |op: &Matmul| matches!(op.epilogue, Epilogue::Rope(_));
        let is_shrink = |node: &&Node| matches!(node.kernel, Kernel::Shrink(_));
        let mut number = 0;
        loop {
            // Words of the first layer do not exist yet, so its low-rank products pass a barrier.
            match nodes.next_if(is_shrink) {
                Some(_) if layer == 0 => links.push(None),
                Some(_) => links.push(Some((layer, Link::Queries(number)))),
                None => {}
            }
            if nodes.next_if(|node| of(node, rotates)).is_none() {
                break;
            }
            links.push(Some((layer, Link::Queries(number))));
            number += 1;
        }
        (1..=MOST_QUERIES).contains(&number).then_some(())?;
        let mut link = |link| links.push(Some((layer, link)));
        let attend = nodes.next()?;
        let Kernel::Attend(op) = &attend.kernel else { return None };
        let group = facts.group(op.kv);
        (op.tile == Tile::Row && attend.sync == Sync::Partials).then_some(())?;
        link(Link::Attend);
        nodes.next_if(|node| matches!(node.kernel, Kernel::Merge(_)))?;
        link(Link::Merge);
        if nodes.next_if(is_shrink).is_some() {
            link(Link::Project);
        }
        let adds = |op: &Matmul| op.input == Input::Ready && matches!(op.epilogue, Epilogue::AddNorm(_));
        nodes.next_if(|node| of(node, adds))?;
        link(Link::Project);
        if nodes.next_if(is_shrink).is_some() {
            link(Link::GateUp);
        }
        let gates = |op: &Matmul| matches!((op.input, &op.epilogue), (Input::Squares(_), Epilogue::Gate(_)));
        nodes.next_if(|node| of(node, gates))?;
        link(Link::GateUp);
        let adds = |op: &Matmul| {
            op.input == Input::Floats && matches!(op.epilogue, Epilogue::AddNorm(_) | Epilogue::Add(1.0))
        };
        if nodes.next_if(is_shrink).is_some() {
            link(Link::Down(false));
        }
        let down = nodes.next_if(|node| of(node, adds))?;
        let Kernel::Matmul(down) = &down.kernel else { return None };
        link(Link::Down(nodes.peek().is_none()));
        // Words of all layers have the same places.
        let own = [facts.program.hidden, group.q_width(), facts.cols(&down.linears[0])];
        let fits = own.iter().all(|width| width.is_multiple_of(4 * BLOCK))
            && group.q_width() == facts.kv.groups[0].q_width();
        if !fits || *widths.get_or_insert(own) != own {
            return None;
        }
        if nodes.peek().is_none() {
            return Some(links);
        }
        // Each layer begins with the activations that the one before has written.
        matches!(down.epilogue, Epilogue::AddNorm(_)).then_some(())?;
    }
    None
}
