/* Who keeps a ring: writers that are killed and succeeded, or end, each with a supervisor of its own, supervisors that are
 * killed and started again, listeners that are adopted, the last one that removes the name; and the trainer that is to hear
 * the end of the data.
 *
 * A lock is the kernel's: free as soon as its holder is dead. The keeper's is taken by one writer alone, or shared by those
 * that remove the name, who hold the places of all owners as well, so that one at a time comes so far. A creator opens the
 * file, waits for removers, and looks whether the file still has the name. Two supervisors are two processes; supervisor v
 * belongs to writer v, of which the second is the successor that takes the ring over. A supervisor knows whom it started
 * and sees, in the segment, whoever lives. The unread payload stands for all of them.
 *
 * The trainer asks a listener: its entry is LIVE. When it leaves, the entry is over; when its listener dies, is stopped, or
 * asks it to come again (it has no demand, and nothing is left), the entry is lost, and it is expected for a time.
 *
 * Defines: WRITERS is 1 or 2; MUT_* plants a fault. */

#ifndef WRITERS
#define WRITERS 2
#endif
#define NOBODY 9

bool S1_port_served_twice;
bool S2_unlinked_with_payloads_in_time;
bool S3_stuck;
bool S4_generation_begun_anew;
bool S5_ended_untold;
bool S6_kept_without_a_name;
bool S7_refused_by_a_remover;

/* the segment */
bool linked = true;
bool unread = true, in_time = true;     /* in_time: linger_s is not over */
bool ended;                     /* a writer has said so, and none has begun since */
byte gen = 1;
byte keeper = 0;                /* who has the writer's lock */
byte holder = NOBODY;           /* who has the supervisor's lock */
bool removing;                  /* a process shares the keeper's lock and has the owners', to remove the name */
bool listening = false;         /* a living listener, on the ring's port */

byte born = 1;                  /* writers so far */
bool finds;                     /* the next one has opened the file */
bool closing;                   /* the keeper: nothing is pending, and it ends its supervisor */
bool over[2];                   /* this supervisor's work is done, or its writer is */
bool waits[2];                  /* started, and not yet the holder */
bool starting = false;          /* the holder starts a listener, having seen none */
bool calm = false;

/* the trainer's connection */
#define NO   0
#define LIVE 1
#define DEAD 2                  /* LIVE, of a listener that died; nobody has looked */
byte entry;
bool lost;                      /* an entry of it: it is expected to come again */
bool rests;                     /* it has no demand */
bool wants;                     /* ghosts: it has asked, and is yet to hear the end; */
bool late;                      /* it was expected, and did not come in time */

#define WRITER_ALIVE (keeper != NOBODY)
#define DRAINED (ended && !unread)
#ifdef MUT_DEAD_IS_GONE
#define EXPECTED (entry == LIVE || lost)
#else
#define EXPECTED (entry != NO || lost)  /* who looks reclaims first */
#endif
#define PENDING (unread || (ended && EXPECTED))
#ifdef MUT_LOST_IS_OVER
#define LOSE entry = NO
#else
#define LOSE entry = NO; lost = true
#endif
#ifdef MUT_STOPPED_IS_OVER
#define STOPPED entry = NO
#else
#define STOPPED LOSE
#endif
/* whoever serves decides so by what is pending */
inline ends() { assert(!DRAINED || !in_time || !wants || late || S5_ended_untold) }
inline stopped() { listening = false; if :: entry == LIVE -> STOPPED :: else fi }
inline unlink() {
  assert(!unread || !in_time || !linked || S2_unlinked_with_payloads_in_time);
  assert(!WRITER_ALIVE || closing || S6_kept_without_a_name);
  linked = false
}
#ifdef MUT_LISTENER_NOT_ADOPTED
#define SEES_NONE true
#else
#define SEES_NONE (!listening)
#endif
#ifdef MUT_STOPS_WITH_ITS_WRITER
#define NEEDED(v) (keeper == v && !closing)
#else
#define NEEDED(v) (!(keeper == v && closing) && (WRITER_ALIVE || (PENDING && in_time)))
#endif
#define SUCCEEDED(v) (WRITER_ALIVE && keeper != v)
#define SUPERVISOR_OPTIONS(v) \
  :: d_step { waits[v] && linked && holder == NOBODY -> waits[v] = false; holder = v; \
       printf("supervisor %d holds the ring\n", v) } \
  :: d_step { waits[v] && !linked -> waits[v] = false; over[v] = true }  /* there is nothing left to serve */ \
  :: d_step { holder == v && SEES_NONE && !starting && NEEDED(v) && !SUCCEEDED(v) -> starting = true } \
  :: d_step { holder == v && starting -> starting = false; \
       assert(!listening || S1_port_served_twice); listening = true; printf("supervisor %d: a listener\n", v) } \
  :: d_step { holder == v && (!NEEDED(v) || SUCCEEDED(v)) && listening ->      /* SIGTERM, waited for */ \
       if :: !WRITER_ALIVE -> ends() :: else fi; stopped() } \
  :: d_step { holder == v && !listening && !starting && (!NEEDED(v) || SUCCEEDED(v)) -> \
       if :: !WRITER_ALIVE -> ends() :: else fi; \
       holder = NOBODY; over[v] = true; LAST_LOOK \
       printf("supervisor %d ends\n", v) } \
  :: d_step { !calm && holder == v -> holder = NOBODY; starting = false; printf("supervisor %d is killed\n", v) } \
  :: d_step { keeper == v && !closing && holder != v && !waits[v] && linked -> waits[v] = true; over[v] = false }   /* its writer starts it again */ \
  :: d_step { linked && waits[v] && keeper != v && !calm -> waits[v] = false }  /* killed before it held it */

/* A name is removed in steps, by whoever finds no owner. */
#define MAY_REMOVE (linked && !WRITER_ALIVE && !listening && !removing)
#ifdef MUT_UNLINKED_WHILE_KEPT
#define LAST_LOOK unlink();
#else
#define LAST_LOOK if :: MAY_REMOVE -> removing = true :: else fi;
#endif
#ifdef MUT_REMOVED_UNREAD
#define MAY_GO true
#else
#define MAY_GO (!unread || !in_time)
#endif
#ifdef MUT_REMOVES_WITHOUT_THE_LOCK
#define MAY_KEEP (keeper == NOBODY)
#else
#define MAY_KEEP (keeper == NOBODY && !removing)
#endif
#ifdef MUT_REMOVER_LOCKS_ALONE
#define KEPT (keeper != NOBODY || removing)
#else
#define KEPT (keeper != NOBODY)
#endif
#ifdef MUT_NAME_NOT_LOOKED_AT_AGAIN
#define STILL_NAMED true
#else
#define STILL_NAMED linked
#endif

active proctype Everybody() {
  waits[0] = true;
end:
  do
  SUPERVISOR_OPTIONS(0)
#if WRITERS > 1
  SUPERVISOR_OPTIONS(1)
  :: d_step { born < WRITERS && linked && !finds && !calm -> finds = true }
  :: d_step { finds && MAY_KEEP ->
       finds = false;
       if
       :: STILL_NAMED ->        /* takes the ring over, and begins */
          assert(linked || S6_kept_without_a_name);
          keeper = born; ended = false;
#ifdef MUT_TAKE_OVER_STARTS_ANEW
          gen = 0;
#endif
          assert(gen == 1 || S4_generation_begun_anew);
          printf("writer %d has the ring\n", keeper)
       :: else -> skip          /* makes another ring */
       fi;
       born++ }
  :: d_step { finds && KEPT -> assert(keeper != NOBODY || S7_refused_by_a_remover); finds = false }
  :: d_step { finds && !calm -> finds = false }
#endif
  :: d_step { !calm && WRITER_ALIVE -> printf("writer %d is killed\n", keeper); keeper = NOBODY; closing = false }
  :: d_step { !calm && WRITER_ALIVE && !ended -> ended = true; printf("writer %d says the end\n", keeper) }
  :: d_step { WRITER_ALIVE && ended && !closing && !PENDING -> ends(); closing = true; printf("writer %d closes\n", keeper) }
  :: d_step { closing && holder == NOBODY && listening -> stopped() }
  :: d_step { closing && holder == NOBODY && !listening -> unlink(); closing = false; keeper = NOBODY }
  :: d_step { !calm && listening -> listening = false; if :: entry == LIVE -> entry = DEAD :: else fi; printf("the listener is killed\n") }
  :: d_step { listening && unread -> unread = false }          /* read, and acknowledged */
  :: d_step { !WRITER_ALIVE && in_time -> in_time = false }                     /* linger_s is over */
#ifndef MUT_ORPHANS_STAY
  /* a listener without writer and supervisor: lingers like one, then unlinks */
  :: d_step { listening && !WRITER_ALIVE && holder == NOBODY && (!PENDING || !in_time) -> ends(); stopped(); removing = true }
#endif
  /* nobody is left: whoever comes next (a writer at its start, `transport reclaim`) finds every lock free */
#ifndef MUT_NOBODY_LOOKS
  :: d_step { MAY_REMOVE && holder == NOBODY && !waits[0] && !waits[1] && MAY_GO -> removing = true }
#endif
  :: d_step { removing -> removing = false; if :: linked && MAY_GO -> unlink() :: else fi }
  :: d_step { !calm && removing -> removing = false }

  /* the trainer */
  :: d_step { listening && linked && entry == NO && !wants && !DRAINED && !calm -> entry = LIVE; wants = true }
  :: d_step { listening && entry != LIVE && wants ->           /* it comes again */
       if :: entry == DEAD -> LOSE :: else fi;
       late = false;
       if :: DRAINED -> wants = false; printf("the trainer hears the end\n") :: else -> entry = LIVE fi }
  :: d_step { entry == LIVE && DRAINED && !rests -> entry = NO; wants = false; printf("the trainer hears the end\n") }
#ifndef MUT_RESTING_ARE_NOT_CALLED
  :: d_step { entry == LIVE && DRAINED && rests -> LOSE; printf("the trainer is to come again\n") }
#endif
  :: d_step { !calm -> rests = !rests }
  :: d_step { !calm && wants -> wants = false; late = false; if :: entry == LIVE -> entry = NO :: else fi; printf("the trainer is killed\n") }
  :: d_step { entry == DEAD -> LOSE }                           /* reclaimed */
  :: d_step { lost -> lost = false; if :: wants && entry == NO -> late = true :: else fi }
  od
}

active proctype End() {
  calm = true;
  timeout;
  /* somebody keeps it, and then it is served and read; or nobody does, and nothing is left of it */
  assert((WRITER_ALIVE && !ended && linked && listening && !unread) ||
         (!WRITER_ALIVE && !linked && !listening && holder == NOBODY) || S3_stuck)
}
