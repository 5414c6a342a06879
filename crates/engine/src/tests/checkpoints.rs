//! Checkpoints of states and their use, as [scripts](super::script).

use expect_test::expect;

use super::script::check;

#[test]
fn a_step_ends_where_a_state_is_copied() {
    check(
        "pages 24, states 2, interval 2",
        "A 19 +7 \n run \n B 24 +2 like A 19 \n run \n C 22 +1 like A 11 \n run",
        expect![[r#"
            run A 0..8; free 20 cached 2
            run A 8..16; save 0>3; free 16 cached 4
            run A 16..19; save 0>7; free 15 cached 4
            run A 19; free 13 cached 6
            run A 20; save 0>10; free 12 cached 6
            run A 21; free 12 cached 6
            run A 22; free 12 cached 6
            run A 23; free 12 cached 6
            run A 24; save 0>10; free 12 cached 12
              A: Length
            run B 16..20; restore 7>0; free 9 cached 10
              B: 16 cached
            run B 20..24; save 0>14; free 6 cached 12
            run B 24; save 0>17; free 6 cached 18
              B: Length
            run C 8..16; restore 3>0; free 2 cached 18
              C: 8 cached
            run C 16..20; save 0>21; free 2 cached 17
            run C 20..22; save 0>24; free 2 cached 22
              C: Length
        "#]],
    );
}

#[test]
fn a_checkpoint_is_made_before_the_beginning_of_an_answer() {
    check(
        "pages 24, states 1, interval 9",
        "A 30 +2 lasts 27 \n run \n B 30 +1 like A 25 \n run",
        expect![[r#"
            run A 0..16; free 20 cached 0
            run A 16..24; free 17 cached 1
            run A 24..30; save 0>7; free 15 cached 1
            run A 30; free 16 cached 8
              A: Length
            run B 24..28; restore 7>0; free 14 cached 3
              B: 24 cached
            run B 28..30; save 0>10; free 14 cached 10
              B: Length
        "#]],
    );
}

#[test]
fn the_newest_checkpoint_of_an_answer_replaces_the_one_before() {
    check(
        "pages 8, states 2, interval 9, carries",
        "A 3 +14 \n run",
        expect![[r#"
        run A 0..3; ahead; free 7 cached 0
        run A 3; free 5 cached 2
        run A 4; save 0>2; ahead; free 4 cached 2
        run A 5; ahead; free 4 cached 2
        run A 6; ahead; free 4 cached 2
        run A 7; free 4 cached 2
        run A 8; save 0>2; ahead; free 3 cached 2
        run A 9; ahead; free 3 cached 2
        run A 10; ahead; free 3 cached 2
        run A 11; free 3 cached 2
        run A 12; save 0>2; ahead; free 2 cached 2
        run A 13; ahead; free 2 cached 2
        run A 14; ahead; free 2 cached 2
        run A 15; free 2 cached 6
          A: Length
    "#]],
    );
}

#[test]
fn what_was_preempted_goes_on_from_its_newest_checkpoint() {
    check(
        "pages 20, sequences 1, states 2, interval 9",
        "A 8 +12 \n step 6 \n B 4 +2 prio 1 \n run",
        expect![[r#"
            run A 0..4; free 17 cached 2
            run A 4..8; save 0>2; free 14 cached 4
            run A 8; save 0>5; free 13 cached 4
            run A 9; free 13 cached 4
            run A 10; free 13 cached 4
            run A 11; free 13 cached 4
            run B 0..4; hold A; save 0>5; free 10 cached 9
            run B 4; hold A; save 0>9; free 10 cached 10
              B: Length
            run A 12; restore 5>0; free 9 cached 7
            run A 13; free 9 cached 7
            run A 14; free 9 cached 7
            run A 15; free 7 cached 9
            run A 16; save 0>12; free 6 cached 9
            run A 17; free 6 cached 9
            run A 18; free 7 cached 13
              A: Length
        "#]],
    );
}

#[test]
fn the_oldest_checkpoints_make_room() {
    check(
        "pages 12, states 3, interval 9",
        "A 9 +1 \n run \n B 9 +1 \n run \n C 9 +1 \n run \n D 9 +1 like A 9 \n run \n E 9 +1 like C 9 \n run",
        expect![[r#"
            run A 0..8; free 7 cached 3
            run A 8; save 0>3; free 7 cached 5
              A: Length
            run B 0..8; free 2 cached 8
            run B 8; save 0>8; free 2 cached 10
              B: Length
            run C 0..8; free 1 cached 9
            run C 8; save 0>2; free 1 cached 11
              C: Length
            run D 0..8; free 1 cached 9
            run D 8; save 0>7; free 1 cached 11
              D: Length
            run E 8; restore 2>0; free 1 cached 11
              E: 8 cached
              E: Length
        "#]],
    );
}

#[test]
fn a_checkpoint_that_somebody_will_make_is_waited_for() {
    check(
        "pages 30, rows 6, states 1, interval 3",
        "A 20 +1 \n B 16 +1 like A 13 \n C 9 +1 like A 8 \n run",
        expect![[r#"
            run C 0..6; hold A B; free 28 cached 0
            run A 0..4, C 6..8; hold B; free 26 cached 1
            run A 4..9, C 8; hold B; save 0>4; free 24 cached 3
              C: Length
            run A 9..12; hold B; free 23 cached 4
            run A 12..14, B 12..16; save 1>7; restore 7>0; free 20 cached 6
              B: 12 cached
              B: Length
            run A 14..16; save 0>10; free 19 cached 7
            run A 16..20; save 1>11; free 19 cached 11
              A: Length
        "#]],
    );
}

#[test]
fn a_failed_step_takes_the_checkpoints_before_it_along() {
    check(
        "pages 16, states 2, interval 2",
        "A 8 +1 \n step \n fail \n step \n B 12 +1 like A 8 \n run",
        expect![[r#"
            run A 0..4; free 13 cached 2
            run A 4..8; save 0>2; free 15 cached 1
              A: the device failed: submit was made to fail
            run B 0..8; free 11 cached 3
            run B 8..12; save 0>4; free 9 cached 7
              B: Length
        "#]],
    );
}
