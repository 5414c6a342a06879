//! Fair shares under random floods of requests.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::{
    fake::VOCAB,
    rig::{Rig, Setup},
};
use crate::Request;

/// Steps until shares are correct: running sequences may be in their quantum and then have to leave, and branches have
/// to find their prompts.
const GRACE: usize = 24;

#[derive(Clone, Debug)]
struct Flood {
    places: usize,
    /// Requests: time of arrival, tenant, branches, tokens.
    requests: Vec<(usize, usize, usize, usize)>,
}

fn floods() -> impl Strategy<Value = Flood> {
    let request = (0..120_usize, 0..4_usize, 1..20_usize, 1..90_usize);
    (1..12_usize, prop::collection::vec(request, 1..16)).prop_map(|(places, mut requests)| {
        requests.sort();
        requests.iter_mut().for_each(|(_, _, branches, _)| *branches = (*branches).min(places));
        Flood { places, requests }
    })
}

fn play(flood: &Flood) -> Result<(), String> {
    let setup =
        Setup { pages: 400, sequences: flood.places, rows: 64, max_wait_steps: 100_000, ..Setup::default() };
    let mut rig = Rig::new(&setup).unwrap();
    let mut open: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
    let mut to_come = flood.requests.iter().enumerate().peekable();
    // Step of the last change in the set of requests, and the step since which each has had no token.
    let (mut step, mut settled) = (0, 0);
    let mut last_token: BTreeMap<usize, usize> = BTreeMap::new();
    while to_come.peek().is_some() || !rig.is_idle() {
        while let Some((index, (_, tenant, branches, tokens))) = to_come.next_if(|(_, r)| r.0 <= step) {
            // No prompt is shared.
            let prompt = (0..3).map(|at| ((index * 5 + at * (index + 1)) % VOCAB) as u32).collect();
            let request = Request {
                branches: *branches,
                max_tokens: Some(*tokens),
                tenant: Some(Arc::from(["a", "b", "c", "d"][*tenant])),
                ..Request::new(prompt)
            };
            let id = rig.submit(&request).map_err(|error| error.to_string())?;
            open.insert(id, (*tenant, *branches));
            last_token.entry(*tenant).or_insert(step);
            settled = step;
        }
        if rig.is_idle() {
            step += 1;
            continue;
        }
        let before: BTreeMap<u64, usize> = tokens_of(&rig);
        rig.step()?;
        step += 1;
        if step > 20_000 {
            return Err("does not come to an end".into());
        }
        for (id, tokens) in tokens_of(&rig) {
            if let Some((tenant, _)) = open.get(&id)
                && before.get(&id) != Some(&tokens)
            {
                last_token.insert(*tenant, step);
            }
        }
        // Remaining tokens of each sequence.
        let count = open.len();
        for (id, (_, left)) in &mut open {
            let ended = rig.heard[id].branches.values().filter(|branch| branch.end.is_some()).count();
            let branches = flood.requests[*id as usize].2;
            if branches - ended < *left {
                (*left, settled) = (branches - ended, step);
            }
        }
        open.retain(|_, (_, left)| *left > 0);
        if open.len() < count {
            settled = step;
        }
        last_token.retain(|tenant, _| open.values().any(|(other, _)| other == tenant));
        if let Some((tenant, since)) = last_token.iter().find(|(_, since)| step - **since > 100) {
            return Err(format!("tenant {tenant} has had no token since step {since}, at step {step}"));
        }
        if step - settled > GRACE {
            check_shares(&rig, flood.places, &open).map_err(|problem| format!("step {step}: {problem}"))?;
        }
    }
    Ok(())
}

fn tokens_of(rig: &Rig) -> BTreeMap<u64, usize> {
    let tokens =
        |branches: &BTreeMap<usize, super::rig::Answer>| branches.values().map(|b| b.tokens.len()).sum();
    rig.heard.iter().map(|(id, heard)| (*id, tokens(&heard.branches))).collect()
}

/// Places and wanted places of a tenant, in total and by request.
type Of = (usize, usize, Vec<(usize, usize)>);

/// Checks that every tenant has the places that it needs or its share, and so has every request of a tenant.
fn check_shares(rig: &Rig, places: usize, open: &BTreeMap<u64, (usize, usize)>) -> Result<(), String> {
    let running = rig.scheduler.tenants();
    let wanted: usize = open.values().map(|(_, left)| left).sum();
    if running.len() < places.min(wanted) {
        return Err(format!("{} of {places} places are taken, but {wanted} are wanted", running.len()));
    }
    let mut tenants: BTreeMap<usize, Of> = BTreeMap::new();
    for (id, (tenant, left)) in open {
        let has = running.iter().filter(|(_, request)| request == id).count();
        let (all, all_wanted, requests) = tenants.entry(*tenant).or_default();
        *all += has;
        *all_wanted += left;
        requests.push((has, *left));
    }
    for (tenant, (has, wanted, requests)) in &tenants {
        if *has < (*wanted).min(places / tenants.len()) {
            return Err(format!("tenant {tenant} has {has} of {places} places: {tenants:?}"));
        }
        if let Some(request) = requests.iter().find(|(own, left)| *own < (*left).min(has / requests.len())) {
            return Err(format!("a request of tenant {tenant} has too little, {request:?}: {tenants:?}"));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn floods_leave_everyone_a_share(flood in floods()) {
        if let Err(problem) = play(&flood) {
            return Err(TestCaseError::fail(problem));
        }
    }
}
